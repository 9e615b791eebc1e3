"""One process of one contender of `benchmarks/scaling.py`: trains with the contender's own loop and
tells what a step takes.

python benchmarks/scaling_worker.py JSON PROCESS
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scaling_models import SIZES, load, make_flax, make_keras, make_torch

RATE, MOMENTUM = 0.01, 0.9


def run_tnt(task: dict[str, Any], process: int, x: Any, y: Any) -> Callable[[], Any]:
    import optax

    import tnt_jax as tnt

    tnt.init()
    model = tnt.Model(make_flax(task["model"]))
    model.compile(
        optax.sgd(RATE, momentum=MOMENTUM),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x = x if len(x) > 1 else x[0]
    return lambda: model.fit(x, y, batch_size=task["batch"], verbose=0)


def run_torch(task: dict[str, Any], process: int, x: Any, y: Any) -> Callable[[], Any]:
    import torch
    from torch.nn.functional import cross_entropy

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.set_num_threads(1)
    num = task["ranks"]
    if num > 1:
        backend, address = "nccl" if on_gpu else "gloo", f"tcp://{task['addresses'][0]}"
        torch.distributed.init_process_group(backend, address, rank=process, world_size=num)
    is_image = x[0].ndim == 4
    net: Any = make_torch(task["model"], x[0].shape[-1])
    if is_image and task["model"] != "mlp":
        # The fastest layout, on CPUs and on GPUs.
        net = net.to(memory_format=torch.channels_last)
    net = net.to(device)
    model = (
        torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        if num > 1
        else net
    )
    if task["contender"].endswith("torch.compile"):
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    # Images lie channels last in memory, and are seen as [rows, channels, height, width].
    inputs = [
        torch.from_numpy(a).permute(0, 3, 1, 2) if is_image else torch.from_numpy(a) for a in x
    ]
    labels, rows = torch.from_numpy(y).long(), task["batch"] // num

    def run() -> None:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        for start in range(process * rows, len(labels), num * rows):
            chosen = order[start : start + rows]
            optimizer.zero_grad(set_to_none=True)
            outputs = model(*[a[chosen].to(device) for a in inputs])
            targets = labels[chosen].to(device)
            cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
            optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()

    return run


def run_tensorflow(task: dict[str, Any], process: int, x: Any, y: Any) -> Callable[[], Any]:
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_keras(task["model"], x[0].shape[1:])
        optimizer = keras.optimizers.SGD(RATE, MOMENTUM)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    data = tf.data.Dataset.from_tensor_slices((x if len(x) > 1 else x[0], y)).shuffle(
        len(y), seed=0
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = strategy.experimental_distribute_dataset(
        data.batch(task["batch"]).prefetch(2).with_options(options)
    )

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        def local(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(inputs, training=True)) / (
                    task["batch"] * np.prod(y.shape[1:])
                )
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)
            return loss

        return strategy.reduce(
            tf.distribute.ReduceOp.SUM, strategy.run(local, (inputs, labels)), axis=None
        )

    def run() -> None:
        for inputs, labels in batches:
            loss = step(inputs, labels)
        float(loss)

    return run


def run_keras(task: dict[str, Any], process: int, x: Any, y: Any) -> Callable[[], Any]:
    import jax
    import keras

    if task["processes"] > 1:
        jax.distributed.initialize(task["addresses"][0], task["processes"], process)
    if task["ranks"] > 1:
        # By default all devices of all processes, which must start from the same weights.
        keras.utils.set_random_seed(0)
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(auto_shard_dataset=False)
        )
    model = make_keras(task["model"], x[0].shape[1:])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE, MOMENTUM), loss=loss)
    # Each process brings its own rows.
    own = slice(process, None, task["processes"])
    inputs = [a[own] for a in x] if len(x) > 1 else x[0][own]
    return lambda: model.fit(
        inputs, y[own], batch_size=task["batch"] // task["processes"], verbose=0
    )


CONTENDERS = {
    "tnt_jax": run_tnt,
    "tnt_jax, sockets": run_tnt,
    "PyTorch DDP": run_torch,
    "PyTorch DDP, torch.compile": run_torch,
    "TensorFlow MultiWorkerMirrored": run_tensorflow,
    "Keras 3 DataParallel": run_keras,
}


def main() -> None:
    task, process = json.loads(sys.argv[1]), int(sys.argv[2])
    steps = SIZES[task["model"]].steps
    x, y = load(task["model"], real=task["data"] == "real", num_rows=steps * task["batch"])
    run = CONTENDERS[task["contender"]](task, process, x, y)
    start = time.perf_counter()
    run()
    first_s, times = time.perf_counter() - start, []
    for _ in range(task["rounds"]):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / steps)
    if process == 0:
        # What the first steps take beyond their steps: compilation, and connections to the other
        # processes.
        print(
            "RESULT " + json.dumps({"seconds": times, "first_s": first_s - steps * min(times)}),
            flush=True,
        )
    # Leaving in order takes seconds and measures nothing; process 0 must not leave the others
    # without their coordinator.
    time.sleep(1 if process == 0 else 0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
