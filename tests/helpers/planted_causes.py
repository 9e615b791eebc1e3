"""Small trainings whose steps are slow for one reason, which `tnt-jax explain` is to name.

tnt-jax explain -- planted_causes.py "slow decode"

Apart from the reason a step computes for some milliseconds, so that nothing else is worth a change.
"""

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

if __name__ == "__main__" and sys.argv[1:] == ["more processes than cores"]:
    os.sched_setaffinity(0, [0])

import flax.linen as nn
import jax
import numpy as np
import optax

import tnt_jax as tnt

RNG = np.random.default_rng(0)
ROWS, WIDTH, CLASSES = 256, 64, 3
X = RNG.normal(size=(4 * ROWS, WIDTH)).astype("f4")
Y = RNG.integers(0, CLASSES, len(X))
PAGE = mmap.PAGESIZE
DISK = "/var/tmp"


class Net(nn.Module):
    width: int = 512
    layers: int = 3

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(CLASSES)(x)


class Normalised(nn.Module):
    """Many small sums: each layer takes the statistics of the global batch."""

    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(8):
            x = nn.Dense(16)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, axis_name="data")(x))
        return nn.Dense(CLASSES)(x)


class Sums(nn.Module):
    """Takes inputs of any width."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(x.sum(1, keepdims=True))


class ChannelsFirst(nn.Module):
    """Convolutions of images `[rows, channels, height, width]`."""

    @nn.compact
    def __call__(self, x):
        for number, channels in enumerate((32, 32, 32)):
            shape = (channels, x.shape[1], 3, 3)
            kernel = self.param(f"kernel_{number}", nn.initializers.normal(0.05), shape)
            numbers = ("NCHW", "OIHW", "NCHW")
            x = nn.relu(
                jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            )
        return nn.Dense(CLASSES)(x.mean((2, 3)))


class Batches:
    """Batches in passes of many, some of which take a while.

    Args:
        seconds: What each batch takes.
        first_s: What the first of a pass takes besides.
        burst_s: What one in eight takes besides.
        grows: Columns that are added with each batch.
    """

    def __init__(self, *, seconds=0.0, first_s=0.0, burst_s=0.0, grows=0):
        self.seconds, self.first_s, self.burst_s, self.grows = seconds, first_s, burst_s, grows
        self.width = WIDTH

    def __iter__(self):
        time.sleep(self.first_s)
        for number in range(1000):
            time.sleep(self.seconds + (self.burst_s if number % 8 == 7 else 0.0))
            self.width += self.grows
            yield np.ones((ROWS, self.width), "f4"), Y[:ROWS]


class ColdFile:
    """Batches of a file whose pages the machine has dropped, as where memory is short."""

    def __iter__(self):
        with tempfile.TemporaryFile(dir=DISK) as file:
            file.write(os.urandom(256 * PAGE))
            file.flush()
            os.fsync(file.fileno())
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
                pages.madvise(mmap.MADV_RANDOM)
                for _ in range(1000):
                    pages.madvise(mmap.MADV_DONTNEED)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    sum(pages[place] for place in range(0, len(pages), PAGE))
                    yield X[:ROWS], Y[:ROWS]


class ReadsWeights(tnt.callbacks.Callback):
    """Waits for the devices after each step, and copies the weights."""

    def on_train_batch_end(self, batch, logs=None):
        print(float(logs["loss"]), *map(np.linalg.norm, self.model.get_weights()))


class Writes(tnt.callbacks.Callback):
    """Writes histograms of the weights to the disk after each step."""

    def __init__(self):
        super().__init__()
        self.file = os.open(DISK, os.O_TMPFILE | os.O_WRONLY)

    def on_train_batch_end(self, batch, logs=None):
        for weights in self.model.get_weights():
            os.write(self.file, np.histogram(weights, 50)[0].tobytes())
            os.fsync(self.file)


def fit(x=X, y=Y, *, module=None, callbacks=None, rows=ROWS):
    """Trains; data that is given alone has its targets."""
    model = tnt.Model(module or Net(), seed=0)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.SGD(0.01), loss)
    arrays = {"batch_size": rows} if isinstance(x, np.ndarray) else {}
    model.fit(x, y if arrays else None, callbacks=callbacks, verbose=0, epochs=2, **arrays)
    raise AssertionError("Training has ended.")


def loop(between=lambda metrics: None, *, x=X, y=Y, module=None, rows=ROWS):
    """Trains in a custom loop, which does something after each step."""
    net = module or Net()
    dataset = tnt.distribute(x, y, batch_size=rows)
    optimizer = optax.sgd(0.01)
    params = net.init(jax.random.key(0), X[:1])
    state = params, optimizer.init(params)

    @tnt.distributed_step
    def train_step(state, batch):
        params, opt_state = state

        def loss_fn(params, batch):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                net.apply(params, batch.inputs), batch.targets
            )
            return tnt.compute_average_loss(losses)

        loss, grads = tnt.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    for _ in range(2):
        for batch in dataset:
            state, metrics = train_step(state, batch)
            between(metrics)
    raise AssertionError("Training has ended.")


def slow_rank():
    """Lets a process of its own stop process 1 for most of the time."""
    if tnt.get_process_index() == 1:
        code = (
            "import os, signal, sys, time\nparent = os.getppid()\n"
            "while os.getppid() == parent:\n"
            "    os.kill(parent, signal.SIGSTOP); time.sleep(0.012)\n"
            "    os.kill(parent, signal.SIGCONT); time.sleep(0.002)\n"
        )
        subprocess.Popen([sys.executable, "-S", "-c", code])
        time.sleep(0.1)
    fit()


def sleep_after(metrics):
    """Logs what the step has returned, slowly."""
    float(metrics["loss"])
    time.sleep(0.03)


@dataclass(frozen=True)
class Planted:
    """A planted cause, and what is to be said of it.

    Attributes:
        train: Trains.
        cause: The name of the cause that comes first.
        text: What stands in its line.
        processes: Processes of the job.
        steps: Steps that are timed in a round.
        rounds: Rounds of each kind of steps.
        flags: Further options of the command.
        environ: Variables of the environment.
        link: Rate of the network between the processes, as `tc` has it; empty for this machine's.
    """

    train: Callable[[], None]
    cause: str
    text: str
    processes: int = 1
    steps: int = 6
    rounds: int = 5
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    link: str = ""


def images():
    return RNG.normal(size=(64, 3, 32, 32)).astype("f4")


PLANTED = {
    "slow decode": Planted(
        lambda: fit(Batches(seconds=0.1)), "reading", "longer than the rest of a step. Keep"
    ),
    "slow first batch": Planted(
        lambda: fit(Batches(first_s=1.0)), "first batch", "as long as"
    ),
    "no prefetch": Planted(
        lambda: fit(Batches(burst_s=0.4)), "reading", "few are read ahead. Keep what is read",
        steps=16,
    ),
    "small batch": Planted(
        lambda: fit(module=Net(8, 1), rows=8), "small batch", "steps_per_execution=8): tried",
        steps=200,
    ),
    "host sync in a callback": Planted(
        lambda: fit(callbacks=[ReadsWeights()]), "callback", "ReadsWeights", steps=20
    ),
    "logging every step": Planted(
        lambda: fit(callbacks=[Writes()]), "callback", "Writes", steps=20
    ),
    "recompilation": Planted(
        lambda: fit(Batches(grows=1), module=Sums()), "recompilation", "float32[256, ", steps=2,
        rounds=3,
    ),
    "slow rank": Planted(slow_rank, "slow rank", "Process 1 computes a step in", processes=2),
    "slow link": Planted(
        lambda: fit(module=Net(256, 2), rows=64), "sums", "Gbit/s", processes=2,
        environ={"TNT_SHARED_MEMORY": "0"}, link="100mbit",
    ),
    "too many small sums": Planted(
        lambda: fit(module=Normalised(), rows=512), "sums", "are below 64 KiB, whose time is that of a start",
        processes=2, steps=3, environ={"TNT_SHARED_MEMORY": "0"},
    ),
    "more processes than cores": Planted(
        fit, "sharing", "One process alone computes its rows faster", processes=2
    ),
    "memory swapping": Planted(lambda: fit(ColdFile()), "memory", "were read from disk"),
    "compile cache not used": Planted(
        lambda: fit(module=Net(64, 150)), "cache", "no programs are kept", steps=2,
        flags=("--no-compilation-cache",),
    ),
    "convolution layout": Planted(
        lambda: fit(images(), Y[:64], module=ChannelsFirst(), rows=16), "convolution",
        "Put the channels last",
    ),
    "custom loop: slow decode": Planted(
        lambda: loop(x=Batches(seconds=0.1), y=None, rows=None), "reading",
        "longer than the rest of a step. Keep",
    ),
    "custom loop: logging every step": Planted(
        lambda: loop(sleep_after), "callback", "(time.sleep(0.03))"
    ),
    "custom loop: small batch": Planted(
        lambda: loop(module=Net(8, 1), rows=8), "small batch", "dataset.stacked(8): tried",
        steps=200,
    ),
}  # fmt: skip


def run(name: str, output: str, *, timeout_s: float = 180) -> dict:
    """Explains a planted cause in processes of its own, and returns the results.

    Args:
        name: Its name.
        output: A new folder for them.
        timeout_s: Seconds that it may take.

    Raises:
        RuntimeError: If there are none; the message has the end of what the command said.
    """
    planted = PLANTED[name]
    words = [
        *(sys.executable, "-m", "tnt_jax.launch", "explain", "--no-gpu"),
        *(
            "-n",
            str(planted.processes),
            "--steps",
            str(planted.steps),
            "--rounds",
            str(planted.rounds),
        ),
        *("--output", output, *planted.flags, "--", __file__, name),
    ]
    if planted.link:
        slow = f"tc qdisc add dev lo root tbf rate {planted.link} burst 32kb latency 1s"
        words = [
            "unshare",
            "-n",
            "sh",
            "-c",
            f'ip link set lo mtu 1500 up && {slow} && exec "$@"',
            "sh",
            *words,
        ]
    kept = {x: value for x, value in os.environ.items() if x not in ("XLA_FLAGS", "PJRT_NPROC")}
    job = subprocess.Popen(
        words,
        env=kept | {"JAX_PLATFORMS": "cpu"} | planted.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = job.communicate(timeout=timeout_s)[0]
    except BaseException as error:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise RuntimeError(f"{name} has not ended after {timeout_s} s.") from None
    results = os.path.join(output, "explain.json")
    if not os.path.exists(results):
        raise RuntimeError(f"{name} was not explained:\n{said[-2000:]}")
    with open(results) as file:
        return json.load(file)


if __name__ == "__main__":
    PLANTED[sys.argv[1]].train()
