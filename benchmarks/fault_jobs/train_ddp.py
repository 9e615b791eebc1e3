"""The job that `benchmarks/faults.py` disturbs, in PyTorch as its tutorial of torchrun writes it.

It saves a snapshot after every epoch and begins with the newest one.
"""

import os

import torch
import torch.distributed as dist
from injected import BATCH, EPOCHS, NUM_ROWS, Disturbance, dataset, finish, folder, record_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SNAPSHOT = folder() / "snapshot.pt"


class Rows(Dataset):
    """Rows by index, which meet what disturbs the loader."""

    def __init__(self, disturbance):
        self.disturbance = disturbance
        self.ids, self.x, self.y = dataset()
        self.read = 0

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        self.read += 1
        self.disturbance.meet("loader", self.read * dist.get_world_size() // BATCH)
        return self.ids[index], self.disturbance.spoil(self.x[index], index), self.y[index]


class Net(nn.Module):
    """The network of `train_tnt.py`."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(NUM_ROWS))
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, ids, x):
        """Returns the prediction, and what `seen` holds for the rows."""
        return self.layers(x), self.seen[ids]


def main():
    """Trains from the snapshot on."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    disturbance = Disturbance(rank)
    net = Net()
    learned = list(net.layers.parameters())
    optimizer = torch.optim.SGD(
        [{"params": [net.seen], "lr": float(BATCH)}, {"params": learned, "momentum": 0.9}], lr=0.05
    )
    first = step = 0
    if SNAPSHOT.exists():
        saved = torch.load(SNAPSHOT)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first, step = saved["epoch"], saved["step"]
    model = DistributedDataParallel(net)
    rows = Rows(disturbance)
    sampler = DistributedSampler(rows, seed=0)
    loader = DataLoader(rows, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for ids, x, y in loader:
            outputs, seen = model(ids, x)
            optimizer.zero_grad()
            ((outputs[:, 0] - y[:, 0]) ** 2 - seen).mean().backward()
            optimizer.step()
            step += 1
            if rank == 0:
                record_step(step)
            disturbance.meet("callback", step)
        if rank == 0:
            saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"epoch": epoch + 1, "step": step}, f"{SNAPSHOT}.new")
            os.replace(f"{SNAPSHOT}.new", SNAPSHOT)
    if rank == 0:
        finish(net.seen.detach().numpy(), [leaf.detach().numpy() for leaf in net.parameters()])
    dist.destroy_process_group()


main()
