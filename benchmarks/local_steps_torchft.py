"""Training by torchft's DiLoCo, beside which `local_steps.py` measures ours.

It needs PyTorch and torchft (`pip install torchft-nightly`), which does not quantize without a GPU.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from scaling_models import make_torch

_LIMIT = timedelta(seconds=120)


def train(
    task: dict[str, Any], process: int, data: Sequence[Any], note: Callable[[], None], rate: float
) -> dict[str, float]:
    """Trains on the rows of a process, calls `note` around epochs, and returns test results."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(task["seed"])
    x, y, x_test, y_test = (torch.from_numpy(np.array(array)) for array in data)
    x, x_test = x.permute(0, 3, 1, 2), x_test.permute(0, 3, 1, 2)
    x, y = x[process :: task["hosts"]], y[process :: task["hosts"]].long()
    rows = task["batch"] // task["hosts"]
    model, loss_of = make_torch(task["model"], 1), torch.nn.functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    with _outer_updates(model, optimizer, task, process):
        for _ in range(task["epochs"]):
            note()
            order = torch.randperm(len(x))
            for start in range(0, len(x), rows):
                batch = order[start : start + rows]
                optimizer.zero_grad()
                loss_of(model(x[batch]), y[batch]).backward()
                optimizer.step()
            note()
    with torch.no_grad():
        logits = model.eval()(x_test)
    correct = (logits.argmax(1) == y_test).float().mean()
    return {"loss": float(loss_of(logits, y_test.long())), "accuracy": float(correct)}


@contextlib.contextmanager
def _outer_updates(
    model: Any, optimizer: Any, task: dict[str, Any], process: int
) -> Iterator[None]:
    """Lets the processes exchange outer updates within the block, if there are any."""
    if (sync := task["sync"]) is None:
        yield
        return
    import torch
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    own, first, port = (os.environ[name] for name in ("OWN_ADDR", "MASTER_ADDR", "MASTER_PORT"))
    # The interface of Gloo is otherwise that of the name of the host.
    cards = [card for card in os.listdir("/sys/class/net") if card != "lo"]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if own.startswith("127.") else cards[0]
    server = LighthouseServer(f"[::]:{port}", task["hosts"]) if process == 0 else None
    store = torch.distributed.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=task["hosts"],
        use_async_quorum=False,
        timeout=_LIMIT,
        quorum_timeout=_LIMIT,
        connect_timeout=_LIMIT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{first}:{port}",
        replica_id=str(process),
        hostname=own,
        init_sync=False,
    )
    layers, delay = list(model.body), sync.get("delay", 0)
    parts = np.array_split(np.arange(len(layers)), sync.get("fragments", 1))
    fragments = [torch.nn.Sequential(*(layers[index] for index in part)) for part in parts]
    outer = [
        torch.optim.SGD(fragment.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for fragment in fragments
    ]
    options = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5 if delay else 0.0}
    with DiLoCo(manager, fragments, optimizer, outer, sync_every=sync["every"], **options):
        yield
    manager.shutdown(wait=False)
    if server is not None:
        server.shutdown()
