"""The job that `benchmarks/faults.py` disturbs, in PyTorch as its tutorial of torchrun writes it.

It saves a snapshot after every epoch and begins with the newest one. The time limit of its
collectives is that of the other jobs' stall detection; the default is half an hour.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from injected import (
    BATCH,
    NUM_ROWS,
    Disturbance,
    dataset,
    differs,
    finish,
    folder,
    plan,
    record_epoch,
    say_begun,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SNAPSHOT = folder() / "disk" / "snapshot.pt"
TIMEOUT = timedelta(seconds=8)


class Rows(Dataset):
    """Rows by index, which meet what disturbs the loader."""

    def __init__(self, disturbance):
        self.disturbance = disturbance
        self.ids, self.x, self.y = dataset()
        if differs("data", dist.get_rank()):
            self.x = self.x + 1

    def __len__(self):
        return NUM_ROWS - BATCH if differs("number of rows", dist.get_rank()) else NUM_ROWS

    def __getitem__(self, index):
        self.disturbance.meet("data")
        return self.ids[index], self.disturbance.spoil(self.x[index]), self.y[index]


class Net(nn.Module):
    """The network of `train_tnt.py`."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(NUM_ROWS))
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, ids, x):
        """Returns the prediction, and what `seen` holds for the rows."""
        return self.layers(x), self.seen[ids]


def save(net, optimizer, epoch, step):
    """Replaces the snapshot."""
    saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved | {"epoch": epoch, "step": step}, f"{SNAPSHOT}.new")
    os.replace(f"{SNAPSHOT}.new", SNAPSHOT)


def validate(model, rows, disturbance):
    """Evaluates two batches on each process."""
    with torch.no_grad():
        for first in (0, BATCH):
            some = slice(first, first + BATCH)
            model.module(torch.from_numpy(rows.ids[some]), torch.from_numpy(rows.x[some]))
            disturbance.meet("validation")


def main():
    """Trains from the snapshot on."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    torch.manual_seed(int(differs("seed", rank)))
    disturbance = Disturbance(rank)
    net = Net()
    if differs("weights", rank):
        nn.init.ones_(net.layers[2].bias)
    learned = list(net.layers.parameters())
    rate = 0.1 if differs("learning rate", rank) else 0.05
    optimizer = torch.optim.SGD(
        [{"params": [net.seen], "lr": float(BATCH)}, {"params": learned, "momentum": 0.9}], lr=rate
    )
    first = step = 0
    if SNAPSHOT.exists():
        saved = torch.load(SNAPSHOT)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first, step = saved["epoch"], saved["step"]
    model = DistributedDataParallel(net)
    rows = Rows(disturbance)
    sampler = DistributedSampler(rows, seed=int(differs("seed", rank)))
    share = BATCH // dist.get_world_size() // (2 if differs("batch size", rank) else 1)
    loader = DataLoader(rows, batch_size=share, sampler=sampler)
    epochs = plan()["epochs"] + int(differs("number of epochs", rank))
    disturbance.step = step
    say_begun(rank)
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for ids, x, y in loader:
            outputs, seen = model(ids, x)
            optimizer.zero_grad()
            ((outputs[:, 0] - y[:, 0]) ** 2 - seen).mean().backward()
            optimizer.step()
            step += 1
            if disturbance.after_step(step):
                return
        validate(model, rows, disturbance)
        if rank == 0:
            record_epoch(epoch + 1, net.seen.detach().numpy(), leaves(net, optimizer))
            save(net, optimizer, epoch + 1, step)
    if rank == 0:
        finish(leaves(net, optimizer))
    dist.destroy_process_group()


def leaves(net, optimizer):
    """Returns all arrays that training changes."""
    momenta = [state["momentum_buffer"] for state in optimizer.state.values() if state]
    tensors = [*net.parameters(), *(momentum for momentum in momenta if momentum is not None)]
    return [leaf.detach().numpy() for leaf in tensors]


main()
