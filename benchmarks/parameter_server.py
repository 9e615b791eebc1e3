"""Examples per second of parameter servers, with equal workers and with one slowed to a third.

Trains the text classifier of the tf.distribute lesson on Ray actors of this machine:
asynchronously, with bounded staleness, synchronously with a backup worker, and synchronously. The
same network trains with `tf.distribute.ParameterServerStrategy`, in processes of its own.

    python benchmarks/parameter_server.py --output benchmarks/results/parameter_server.json

Workers share the cores of the machine, so each waits in every batch for a fixed time that stands
for its device (`--wait-ms`); the slow one waits three times as long. The first batches, which
compile, are not timed. `--plot` draws what was recorded.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from machine import commit

NUM_WORKERS, NUM_SERVERS, BATCH, VOCABULARY, TOKENS, CLASSES = 3, 1, 64, 1000, 16, 10
WAYS = {
    "asynchronous": {},
    "staleness of at most 4": {"max_staleness": 4},
    "backup worker": {"max_staleness": 0, "backup_workers": 1},
    "synchronous": {"max_staleness": 0},
}
THEIRS = "tf.distribute.ParameterServerStrategy"


def data(num_batches):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCABULARY, (num_batches * BATCH, TOKENS))
    return tokens, (tokens[:, 0] % CLASSES).astype(np.int32)


def ours(args, record):
    import ray

    import tnt_jax as tnt

    ray.init(num_cpus=NUM_SERVERS + NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    x, y = data(args.batches)
    for way, options in WAYS.items():
        model = tnt.Model(tnt.models.TextClassifier(VOCABULARY, CLASSES))
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tnt.optimizers.SGD(0.1), loss=loss)
        # Every worker computes as many rows at a time, whatever the way.
        shares = NUM_WORKERS - options.get("backup_workers", 0)
        size = BATCH * (shares if options.get("max_staleness") == 0 else 1)
        with tnt.ParameterServer(
            model, num_servers=NUM_SERVERS, num_workers=NUM_WORKERS, checkpoint_every=10**6,
            **options,
        ) as server:  # fmt: skip
            server.fit(x[: 8 * size], y[: 8 * size], batch_size=size, verbose=0)
            for is_slow in (False, True):
                for number, worker in server._actors.workers.items():
                    factor = 3 if is_slow and number == 0 else 1
                    ray.get(worker.wait_for.remote(args.wait_ms / 1000 * factor))
                rates = []
                for _ in range(args.rounds):
                    start = time.perf_counter()
                    server.fit(x, y, batch_size=size, verbose=0)
                    rates.append(len(x) / (time.perf_counter() - start))
                record(way, is_slow, rates)
            print(server.statistics.summary(), flush=True)
    ray.shutdown()


def theirs(args, record):
    """Starts TensorFlow's workers and server twice, the second time with a slow worker."""
    for is_slow in (False, True):
        command = [sys.executable, __file__, "--coordinate", str(int(is_slow))]
        command += ["--batches", str(args.batches), "--rounds", str(args.rounds)]
        command += ["--wait-ms", str(args.wait_ms)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=200)
        record(THEIRS, is_slow, json.loads(done.stdout.splitlines()[-1]))


def serve(kind, index):
    import tensorflow as tf

    cluster = tf.train.ClusterSpec(json.loads(os.environ["TF_CONFIG"])["cluster"])
    server = tf.distribute.Server(cluster, job_name=kind, task_index=index, protocol="grpc")
    server.join()


def coordinate(args):
    """Trains with TensorFlow's parameter servers; prints the rates of the rounds."""
    roles = [("worker", i) for i in range(NUM_WORKERS)] + [("ps", i) for i in range(NUM_SERVERS)]
    hosts = [f"127.0.0.1:{port}" for port in free_ports(len(roles) + 1)]
    cluster = {"worker": hosts[:NUM_WORKERS], "ps": hosts[NUM_WORKERS:-1], "chief": hosts[-1:]}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    )
    processes = []
    for kind, index in roles:
        is_slow = args.coordinate and (kind, index) == ("worker", 0)
        environment = {**os.environ, "BENCHMARK_FACTOR": "three" if is_slow else "one"}
        command = [sys.executable, __file__, "--serve", kind, str(index)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    try:
        print(json.dumps(rates_of_theirs(args)))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rates_of_theirs(args):
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    rng = np.random.default_rng(0)
    sizes = [(VOCABULARY, 128), (128, 256), (256,), (256, 64), (64,), (64, CLASSES), (CLASSES,)]
    with strategy.scope():
        variables = [tf.Variable(0.05 * rng.normal(size=s).astype("float32")) for s in sizes]
    x, y = data(args.batches)

    def batches():
        # Runs on each worker, whose own environment says whether it is the slow one.
        own = tf.io.read_file("/proc/self/environ")
        is_slow = tf.strings.regex_full_match(own, r"(?s).*BENCHMARK_FACTOR=three.*")
        wait_us = 1000 * args.wait_ms * tf.cast(tf.where(is_slow, 3, 1), tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
        return dataset.apply(sleep(wait_us))

    @tf.function
    def step(iterator):
        tokens, labels = next(iterator)
        with tf.GradientTape() as tape:
            hidden = tf.reduce_mean(tf.gather(variables[0], tokens), axis=1)
            hidden = tf.nn.relu(hidden @ variables[1] + variables[2])
            hidden = tf.nn.relu(hidden @ variables[3] + variables[4])
            logits = hidden @ variables[5] + variables[6]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        grads = tape.gradient(loss, variables)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(grad))
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    rates = []
    for number in range(args.rounds + 1):
        num_batches = args.batches if number else 8 * NUM_WORKERS
        start = time.perf_counter()
        for _ in range(num_batches):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        if number:  # The first round compiles.
            rates.append(num_batches * BATCH / (time.perf_counter() - start))
    return rates


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def plot(found, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["way"] for row in found["rows"]))
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for offset, is_slow, label in ((-0.2, False, "equal workers"), (0.2, True, "one slow worker")):
        rows = [
            next(r for r in found["rows"] if (r["way"], r["slow"]) == (name, is_slow))
            for name in names
        ]
        medians = [row["median"] for row in rows]
        errors = [
            [row["median"] - min(row["rates"]) for row in rows],
            [max(row["rates"]) - row["median"] for row in rows],
        ]
        places = [index + offset for index in range(len(names))]
        axes.bar(places, medians, 0.4, yerr=errors, label=label)
    axes.set_xticks(range(len(names)), [name.replace(".", ".\n") for name in names], fontsize=8)
    axes.set_ylabel("examples/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=120, help="batches of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait-ms", type=int, default=50, help="wait of an equal worker")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the results in --output here")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--coordinate", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], int(args.serve[1]))
    if args.coordinate is not None:
        return coordinate(args)
    if args.plot:
        return plot(json.loads(args.output.read_text()), args.plot)
    rows = []

    def record(way, is_slow, rates):
        rows.append(
            {"way": way, "slow": is_slow, "median": statistics.median(rates), "rates": rates}
        )
        print(f"{way}, {'slow' if is_slow else 'equal'}: {rows[-1]['median']:.0f} examples/s "
              f"({min(rates):.0f} to {max(rates):.0f})", flush=True)  # fmt: skip

    theirs(args, record)
    ours(args, record)
    found = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("jax", "ray", "tensorflow-cpu", "flax")},
        "workers": NUM_WORKERS,
        "servers": NUM_SERVERS,
        "batch": BATCH,
        "wait_ms": args.wait_ms,
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
