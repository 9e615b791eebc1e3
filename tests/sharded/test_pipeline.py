"""Models with stacked layers in pipelines, against the same models on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec
from stacked_models import Dropping, Stacked

from tnt_jax import models
from tnt_jax.adapters.linen import LinenAdapter
from tnt_jax.adapters.nnx import NnxAdapter
from tnt_jax.distributed.sums.random_rows import batch_key
from tnt_jax.sharded.pipeline.pipeline import Pipeline, pipelined
from tnt_jax.train.state import state_arrays

ROWS = 6
TOKENS = np.random.default_rng(0).integers(0, 11, (ROWS, 7))
POLICY = jax.checkpoint_policies.nothing_saveable


DECODER = models.Decoder(**{**models.DECODER_SIZES["tiny"], "vocab_size": 11})
ADAPTERS = {
    "decoder": lambda: LinenAdapter(DECODER),
    "dropping": lambda: LinenAdapter(Dropping()),
    "nnx": lambda: NnxAdapter(Stacked()),
}


def step(apply, params, model_state, tokens, weight):
    """Loss and gradients of a rank's rows, summed over the ranks as the training step does."""
    params = jax.lax.pcast(params, "data", to="varying")
    key = batch_key(jnp.arange(2, dtype=jnp.uint32), 3, len(tokens))

    def loss(params):
        outputs = apply(params, model_state, tokens, key=key, train=True, mask=None).outputs
        return jnp.sum(outputs**2 * weight[:, None, None])

    return jax.lax.psum(jax.value_and_grad(loss)(params), "data")


def run(adapter, apply, num_data, num_stages, path="layers"):
    variables = adapter.init(TOKENS, seed=0)
    specs = jax.tree.unflatten(
        jax.tree.structure(variables.params),
        [
            PartitionSpec("stage")
            if name.startswith(f"{path}/") and num_stages > 1
            else PartitionSpec()
            for name in state_arrays(variables.params)
        ],
    )
    names = ("data", "stage") if num_stages > 1 else ("data",)
    devices = np.array(jax.devices()[: num_data * num_stages])
    mesh = Mesh(devices.reshape((num_data, num_stages)[: len(names)]), names)
    by_row, replicated = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        partial(step, apply),
        mesh=mesh,
        in_specs=(specs, replicated, by_row, by_row),
        out_specs=(replicated, specs),
    )
    weight = jnp.arange(ROWS) / ROWS
    return jax.jit(mapped)(variables.params, variables.model_state, TOKENS, weight)


@pytest.mark.parametrize(
    ("kind", "num_data", "num_stages", "microbatches", "policy"),
    [
        # Those below have rows to spare and several ranks, too.
        pytest.param("decoder", 1, 4, 3, None, marks=pytest.mark.long),
        # Three rows in two micro-batches.
        pytest.param("decoder", 2, 2, 2, POLICY, marks=pytest.mark.long),
        pytest.param("dropping", 2, 4, 2, None, marks=pytest.mark.long),
        pytest.param("nnx", 1, 2, 4, None, marks=pytest.mark.long),
    ],
)
def test_a_pipeline_equals_one_device(kind, num_data, num_stages, microbatches, policy):
    adapter = ADAPTERS[kind]()
    expected = run(adapter, adapter.apply, 1, 1)
    apply = pipelined(adapter.apply, Pipeline("layers", microbatches=microbatches), policy=policy)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        run(adapter, apply, num_data, num_stages),
        expected,
    )


@pytest.mark.long  # Two programs; what has stages is tested above.
def test_without_stages_the_forward_pass_stays():
    adapter = ADAPTERS["decoder"]()
    apply = pipelined(adapter.apply, Pipeline("layers", microbatches=2))
    plain, same = (run(adapter, f, 1, 1) for f in (adapter.apply, apply))
    jax.tree.map(np.testing.assert_array_equal, same, plain)


class Pooled(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return jnp.mean(DECODER.copy(name="decoder")(tokens), axis=(0, 1))


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, tokens, train):
        x = nn.BatchNorm(use_running_average=not train, axis_name="data")(tokens[..., None] * 1.0)
        return DECODER.copy(name="decoder")(tokens) + x


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, tokens, train):
        x = DECODER.copy(name="decoder")(tokens)
        self.sow("losses", "size", jnp.mean(x**2))
        return x


@pytest.mark.parametrize(
    ("module", "path", "message"),
    [
        (DECODER, "blocks", "needs a model with one loop over the stacked layers 'blocks'"),
        (DECODER, "norm", "which alone uses their parameters. Parameters lie in embedding"),
        (Normalized(), "decoder/layers", "keep statistics of the rows, such as BatchNorm"),
        (Pooled(), "decoder/layers", r"a row for each of the 3 row\(s\) of a micro-batch.*\[11\]"),
        (Sowing(), "decoder/layers", "losses or metrics that the model computes from its inputs"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(module, path, message):
    adapter = LinenAdapter(module)
    with pytest.raises(ValueError, match=message):
        run(adapter, pipelined(adapter.apply, Pipeline(path, microbatches=2)), 1, 2, path)


@pytest.mark.parametrize(
    ("path", "microbatches", "message"),
    [
        ("layers", 0, "microbatches must be a whole number of at least 1, but is 0"),
        ("layers", 1.5, "of at least 1, but is 1.5"),
        (
            "/",
            2,
            "must name stacked layers among the parameters, such as 'layers', or a list of blocks, but is '/'",
        ),
    ],
)
def test_arguments_of_a_pipeline_are_checked(path, microbatches, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(path, microbatches=microbatches)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule must be 'gpipe' or '1f1b', but is 'zigzag'"):
        Pipeline("layers", microbatches=2, schedule="zigzag")


def test_a_pipeline_says_what_it_costs():
    assert Pipeline("layers", microbatches=12, schedule="1f1b").description(4) == (
        "Pipeline of layers: 4 stages, 12 micro-batches, 1f1b; a stage waits for 20.0% of a step"
    )
