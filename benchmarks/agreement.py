"""What the comparison of processes costs: at the start of `fit`, and at the end of each epoch.

Two arms take turns in one job: `fit` as it is, and `fit` without the comparison of settings and of
weights (which then meets for `stop_training` alone, as it must). Besides the difference of whole
epochs, which drowns in noise where epochs are long, the comparisons themselves are timed.

    python benchmarks/agreement.py --processes 2 --model resnet20 --steps 50 --rounds 9

The share is the median time of the checksums of an epoch, divided by that of the epoch. They travel
with the meeting that decides on `stop_training`; its time, also printed, is mostly that of waiting
for the slower process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from unittest import mock

MODELS = ("mlp", "resnet20")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--model", choices=MODELS, default="resnet20", help="network")
    parser.add_argument("--batch-size", type=int, default=32, help="global batch (default: 32)")
    parser.add_argument("--steps", type=int, default=50, help="steps of an epoch (default: 50)")
    parser.add_argument("--rounds", type=int, default=9, help="fits of each arm (default: 9)")
    parser.add_argument("--output", help="JSON file for the results")
    return parser.parse_args()


def make_model(name):
    import flax.linen as nn

    import tnt_jax as tnt

    if name == "resnet20":
        module, shape = tnt.models.resnet20(), (32, 32, 3)
    else:
        module = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(10)])
        shape = (784,)
    model = tnt.Model(module)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.SGD(0.01, momentum=0.9), loss=loss)
    return model, shape


class Timed:
    """A function that records how long its calls take, in milliseconds."""

    def __init__(self, function):
        self.function, self.ms = function, []

    def __call__(self, *args, **kwargs):
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.ms.append(1000 * (time.perf_counter() - start))


@contextmanager
def arm(compares, start, end, sums):
    """Runs the block with the comparisons, timed, or without them."""
    from tnt_jax.distributed.host import collectives
    from tnt_jax.keras_compat.fit import fit_loop, start_check

    def stops_alone(self, state, *, epoch, stop_training):
        return collectives.any_process(stop_training, where=f"end of epoch {epoch}")

    first = start if compares else lambda *args: None
    kind = start_check.Divergence
    check = (lambda self, *args, **named: end(self, *args, **named)) if compares else stops_alone
    at_start = kind.check_start if compares else lambda self, state: None
    with (
        mock.patch.object(start_check, "local_checksums", sums),
        mock.patch.object(fit_loop, "compare_starts", first),
        mock.patch.object(kind, "check", check),
        mock.patch.object(kind, "check_start", at_start),
    ):
        yield


def measure(arguments):
    import jax
    import numpy as np

    import tnt_jax as tnt
    from tnt_jax.keras_compat.fit import fit_loop, start_check
    from tnt_jax.train.health.state_checksums import replicated_arrays

    class Epochs(tnt.callbacks.Callback):
        """Times the epochs from the beginning of one to that of the next."""

        def on_train_begin(self, logs=None):
            self.begins = []

        def on_epoch_begin(self, epoch, logs=None):
            self.begins.append(time.perf_counter())

    model, shape = make_model(arguments.model)
    rng = np.random.default_rng(0)
    rows = arguments.batch_size * arguments.steps
    x, y = rng.normal(size=(rows, *shape)).astype(np.float32), rng.integers(0, 10, rows)
    epochs = Epochs()
    start, end = Timed(fit_loop.compare_starts), Timed(start_check.Divergence.check)
    sums = Timed(start_check.local_checksums)
    took = {True: [], False: []}
    call_s = {True: [], False: []}
    named = {"batch_size": arguments.batch_size, "verbose": 0, "callbacks": [epochs]}
    model.fit(x, y, epochs=1, **named)
    for round_number in range(2 * arguments.rounds):
        compares = round_number % 2 == 0
        with arm(compares, start, end, sums):
            begin = time.perf_counter()
            model.fit(x, y, epochs=3, **named)
        call_s[compares].append(epochs.begins[0] - begin)
        took[compares] += np.diff(epochs.begins).tolist()
    arrays = replicated_arrays(model.state)
    return {
        "model": arguments.model, "processes": tnt.get_process_count(), "ranks": tnt.get_size(),
        "batch_size": arguments.batch_size, "steps": arguments.steps, "arrays": len(arrays),
        "megabytes": sum(leaf.nbytes for leaf in arrays) / 2**20,
        "epoch_s": {str(key): statistics.median(value) for key, value in took.items()},
        "before_first_epoch_s": {key: statistics.median(v) for key, v in call_s.items()},
        "start_ms": statistics.median(start.ms), "end_ms": statistics.median(end.ms),
        "end_ms_range": [min(end.ms), max(end.ms)],
        "sums_ms": statistics.median(sums.ms), "sums_ms_range": [min(sums.ms), max(sums.ms)],
        "share": statistics.median(sums.ms) / 1000 / statistics.median(took[True]),
        "jax": jax.__version__, "cores": os.cpu_count(),
    }  # fmt: skip


def report(found):
    epoch, before = found["epoch_s"], found["before_first_epoch_s"]
    print(
        "| model, processes | arrays, MB | settings ms | before the first epoch ms, with, without "
        "| checksums ms | with meeting ms | epoch s, with, without | share |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {found['model']}, {found['processes']} | {found['arrays']}, {found['megabytes']:.1f} "
        f"| {found['start_ms']:.2f} | {1000 * before[True]:.1f}, {1000 * before[False]:.1f} "
        f"| {found['sums_ms']:.2f} | {found['end_ms']:.2f} "
        f"| {epoch['True']:.4f}, {epoch['False']:.4f} | {found['share']:.3%} |"
    )


def main():
    arguments = parse_arguments()
    if "TNT_JOB_ID" not in os.environ:
        command = [sys.executable, "-m", "tnt_jax.launch", "-n", str(arguments.processes)]
        command += ["--no-gpu", "--", __file__, *sys.argv[1:]]
        sys.exit(subprocess.call(command))
    import tnt_jax as tnt

    found = measure(arguments)
    if tnt.is_master_rank():
        report(found)
        if arguments.output:
            with open(arguments.output, "w") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
