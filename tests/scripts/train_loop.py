"""Trains a custom training loop and `fit` beside it, then makes mistakes; writes what came out.

Run by the multi-process tests.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from own_loops import average, descend, make_state, make_step
from reference_trainer import Net, make_data

import tnt_jax as tnt


def trained(x, y, weight, size):
    """Returns parameters, losses and metrics of a loop, and parameters of `fit`."""
    net, tx = Net(batch_norm=True, dropout=0.4, axis_name="data"), optax.sgd(0.05, momentum=0.9)
    step, state, losses = make_step(net), make_state(net, tx, x), []
    dataset = tnt.distribute(x, y, sample_weight=weight, batch_size=size)
    for _ in range(2):
        for batch in dataset:
            state, metrics = step(state, batch, jax.random.key(0))
            losses.append(metrics["loss"])
    model = tnt.Model(net)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tx, loss=loss)
    model.fit(x, y, batch_size=size, epochs=2, verbose=0, sample_weight=weight)
    return state, {"losses": np.array(losses)}, model.variables


def evaluated(state, x, y, size):
    """Returns results of an evaluation by every way to reduce, and by a metric."""
    accuracy = tnt.metrics.SparseCategoricalAccuracy()

    @tnt.distributed_eval_step
    def evaluate(state, batch):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = state.apply_fn(variables, batch.inputs, train=False)
        accuracy.update_state(batch.targets, logits)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        results = {op: tnt.reduce(losses, op) for op in ("sum", "mean", "max", "min", "concat")}
        return results | {"correct": tnt.reduce(jnp.argmax(logits, -1) == batch.targets)}

    found = []
    for batch in tnt.distribute(x, y, batch_size=size, shuffle=False):
        results = evaluate(state, batch)
        found.append(results | {"concat": batch.without_padding(results["concat"])})
    return {
        "rows": np.concatenate([one["concat"] for one in found]),
        "sum": sum(one["sum"] for one in found),
        "mean": np.array([one["mean"] for one in found]),
        "max": max(one["max"] for one in found),
        "min": min(one["min"] for one in found),
        "correct": sum(one["correct"] for one in found),
        "accuracy": accuracy.result(),
    }


def error_of(function):
    """Returns the error of a call, in words."""
    try:
        function()
    except Exception as error:  # The test compares what was raised.
        return f"{type(error).__name__}: {error}"
    return "none"


def mistakes(x, y):
    """Returns the errors of calls that differ between processes."""
    process, params = tnt.get_process_index(), {"kernel": np.ones((6, 3), np.float32)}

    @tnt.distributed_step
    def step(params, batch):
        loss, grads = tnt.value_and_grad(lambda p: average(p, batch))(params)
        return descend(params, grads), {"loss": loss}

    def other_batches():
        batches = iter(tnt.distribute(x, y, batch_size=4))
        if process == 1:
            next(batches)
        state, metrics = params, None
        for batch in batches:
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    @tnt.distributed_step
    def with_own_sum(params, batch):
        _, grads = tnt.value_and_grad(lambda p: average(p, batch))(params)
        return descend(params, grads), {"mean": jax.lax.pmean(jnp.mean(batch.inputs), "data")}

    first = next(iter(tnt.distribute(x, y, batch_size=4)))
    return {
        "data": error_of(lambda: tnt.distribute(x[: 20 - process], y[: 20 - process])),
        "order": error_of(lambda: tnt.distribute(x, y, seed=process)),
        "state": error_of(lambda: step({"kernel": params["kernel"] + process}, first)),
        # No mistake: sums of the user's own beside gradients do not hang.
        "own sum": error_of(lambda: jax.block_until_ready(with_own_sum(params, first))),
        # The last one, as nothing is exchanged after it.
        "batches": error_of(other_batches),
    }


def main():
    recipe = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", recipe["devices"])
    x, y, weight = make_data(31)
    state, results, by_fit = trained(x, y, weight, 9)
    results |= evaluated(state, x, y, 9)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    for name, tree in (("loop", variables), ("fit", dict(by_fit))):
        results |= {
            f"{name}{jax.tree_util.keystr(path)}": np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
    out = Path(sys.argv[2]) / f"process{tnt.get_process_index()}"
    np.savez(out.with_suffix(".npz"), **results)
    if recipe["mistakes"]:
        out.with_suffix(".json").write_text(json.dumps(mistakes(x, y)))


if __name__ == "__main__":
    main()
