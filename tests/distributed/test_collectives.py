import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.sums.reduction import StateAverage, psum


def run_average(state, share):
    mesh = _jax.make_data_mesh(jax.devices()[:4])

    def average(state, share):
        local = {"per_rank": state["per_rank"][0], "same": state["same"]}
        averages = StateAverage(local, None if share is None else share[0])
        return averages.result(psum(averages.summands))

    specs = ({"per_rank": P("data"), "same": P()}, P("data"))
    return jax.jit(_jax.shard_map(average, mesh=mesh, in_specs=specs, out_specs=P()))(state, share)


def test_floating_model_state_is_averaged_by_share_and_the_rest_kept():
    state = {"per_rank": np.float32([1, 2, 3, 6]), "same": np.int32(7)}
    assert run_average(state, None)["per_rank"] == 3
    weighted = run_average(state, np.float32([0.5, 0.5, 0, 0]))
    assert weighted["per_rank"] == 1.5
    assert weighted["same"] == 7


def test_integer_state_that_differs_between_ranks_is_refused():
    with pytest.raises(TypeError, match=r"per_rank.*int32.*differs between ranks"):
        run_average({"per_rank": np.int32([1, 2, 3, 6]), "same": np.int32(7)}, None)


@pytest.mark.parametrize(
    "value",
    [3, 2.5, np.arange(6).reshape(2, 3), {"a": [np.float32(1.5), np.zeros(0)], "b": jnp.ones(3)}],
)
def test_host_collectives_of_one_process_return_the_value(value):
    for function in (collectives.broadcast, collectives.all_reduce):
        jax.tree.map(np.testing.assert_array_equal, function(value), value)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)[None]),
        collectives.all_gather(value),
        value,
    )


def test_text_cannot_be_summed():
    with pytest.raises(TypeError, match=r"all_reduce takes numbers.* \[0\] is <U3"):
        collectives.all_reduce(["abc"])


def test_raise_on_all_processes_raises_what_happened_here():
    collectives.raise_on_all_processes(None)
    with pytest.raises(KeyError, match="gone"):
        collectives.raise_on_all_processes(KeyError("gone"))


def test_describe_counts_planned_and_compiled_collectives():
    tnt.shutdown()
    tnt.init(devices=range(4))
    x, y = np.ones((8, 3), np.float32), np.zeros(8, np.int32)
    try:
        model = tnt.Model(nn.Dense(5))
        model.compile("sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
        found = model.describe_collectives(x, y, 8)
    finally:
        tnt.shutdown()
    gradients = sorted(size for kind, size in found.planned if kind == "all-reduce")[-2:]
    assert gradients == [5 * 4, 3 * 5 * 4]
    assert sum(x.nbytes for x in found.compiled) >= sum(gradients)
    assert re.search(r"planned +\d+ all-reduce +\d+ bytes, largest 60\ncompiled", str(found))
    assert f"of {len(found.compiled)}" in str(found)
