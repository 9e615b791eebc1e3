"""Models of every library, and the larger ones, equal one device on a mesh."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from sharded_kinds import (
    CLASSES,
    KINDS,
    WIDTH,
    OfNnx,
    averaged_sgd,
    clipped_adam,
    numbers,
    of_keras,
)
from training import assert_close, crossentropy

import tnt_jax as tnt

pytestmark = pytest.mark.parametrize("what_moves", ["parameters", "rows"], indirect=True)

SIZE = 8


def make_data():
    return numbers(np.random.default_rng(0))


def train(make, optimizer, x, y, **options):
    model = tnt.Model(make(), seed=0, **options)
    model.compile(optimizer, loss=crossentropy())
    history = model.fit(x, y, batch_size=SIZE, epochs=2, verbose=0).history
    return model, history


def compare(use_ranks, make, mesh, optimizer=lambda: optax.sgd(0.1), data=None, **options):
    """Trains on one device and on a mesh over as many as it needs; returns the model there."""
    x, y = make_data() if data is None else data
    rules, tolerance = options.pop("sharding_rules", ()), options.pop("tolerance", 1e-5)
    use_ranks(1)
    whole, expected = train(make, optimizer(), x, y, **options)
    weights, predicted = whole.get_weights(), whole.predict(x, batch_size=SIZE, verbose=0)
    evaluated = whole.evaluate(x, y, batch_size=SIZE, verbose=0)
    use_ranks(int(np.prod(list(mesh.values()))))
    model, history = train(make, optimizer(), x, y, mesh=mesh, sharding_rules=rules, **options)
    assert_close(history, expected, tolerance)
    assert_close(model.get_weights(), weights, tolerance)
    assert_close(model.predict(x, batch_size=SIZE, verbose=0), predicted, tolerance)
    assert_close(model.evaluate(x, y, batch_size=SIZE, verbose=0), evaluated, tolerance)
    return model


def is_cut(model, axis):
    return any(axis in x.sharding.spec for x in jax.tree.leaves(model.state.params))


@pytest.mark.long  # Linen and Keras are run by default.
def test_an_nnx_module_equals_one_device(use_ranks):
    model = compare(use_ranks, OfNnx, {"data": 2, "fsdp": 2}, clipped_adam)
    assert is_cut(model, "fsdp")
    # The module gets whole arrays back.
    assert model.module.first.kernel[...].shape == (WIDTH, 64)


@pytest.mark.long  # As NNX, which holds its variables, too.
def test_a_keras_model_equals_one_device(use_ranks):
    model = compare(use_ranks, of_keras, {"data": 2, "fsdp": 2}, lambda: "adam")
    assert is_cut(model, "fsdp")


@pytest.fixture
def double_precision():
    """Lets JAX and Keras compute in float64."""
    import keras

    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
    keras.config.set_floatx(before)


@pytest.mark.long  # Beside the test above, synchronized statistics.
def test_synchronized_batch_statistics_equal_one_device(use_ranks, double_precision):
    # In float32, normalization by the moving variance of a few rows multiplies the rounding of
    # sums up to 3e-5 in predictions, with plain data parallelism as with a mesh; in float64 all is
    # within 1e-6.
    def make():
        return of_keras(normalized=True)

    x, y = make_data()
    mesh = {"data": 2, "fsdp": 2}
    data = x.astype(np.float64), y
    compare(use_ranks, make, mesh, data=data, synchronize_batch_norm=True, tolerance=1e-6)


class Normalized(nn.Module):
    """Has BatchNorm over the axes that the errors of a mesh name."""

    axes: tuple[str, ...] | str | None

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(64)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axes)(x)
        return nn.Dense(CLASSES)(nn.relu(x))


def test_batch_norm_over_the_axes_of_the_ranks_equals_one_device(use_ranks):
    x, y = make_data()

    def run(axes, **options):
        model = tnt.Model(Normalized(axes), seed=0, **options)
        model.compile(optax.sgd(0.1), loss=crossentropy())
        history = model.fit(x[:24], y[:24], batch_size=SIZE, epochs=1, verbose=0).history
        return history, model.get_weights()

    use_ranks(1)
    expected = run("data")
    use_ranks(4)
    assert_close(run(("data", "fsdp"), mesh={"data": 2, "fsdp": 2}), expected)


class Named(nn.Module):
    """Dimensions with logical names."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        kernel = nn.with_logical_partitioning(init, ("embed", "mlp"))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
        x = nn.relu(nn.Dense(64, kernel_init=kernel, bias_init=bias)(x))
        return nn.Dense(CLASSES, kernel_init=nn.with_logical_partitioning(init, ("mlp", None)))(x)


@pytest.mark.long  # The rules themselves are tested beside.
def test_logical_names_of_linen_choose_the_axes(use_ranks):
    model = compare(
        use_ranks,
        Named,
        {"fsdp": 2, "tensor": 2},
        sharding_rules=[("mlp", "tensor"), ("embed", "fsdp")],
    )
    kernel = model.state.params["Dense_0"]["kernel"].unbox()
    assert tuple(kernel.sharding.spec) == ("fsdp", "tensor")


class NamedNnx(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        first = nnx.with_partitioning(init, ("embed", "mlp"))
        self.first = nnx.Linear(WIDTH, 64, rngs=rngs, kernel_init=first)
        self.last = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


@pytest.mark.long
def test_metadata_of_nnx_choose_the_axes(use_ranks):
    def make():
        with nnx.use_eager_sharding(False):
            return NamedNnx(nnx.Rngs(0))

    rules = [("mlp", "tensor"), ("embed", None)]
    model = compare(use_ranks, make, {"fsdp": 2, "tensor": 2}, sharding_rules=rules)
    kernel = model.state.params["first"]["kernel"]
    assert tuple(kernel.sharding.spec) == ("fsdp", "tensor")


@pytest.mark.long
def test_a_transformer_cut_by_columns_and_rows_equals_one_device(use_ranks):
    kind = KINDS["transformer"]
    model = compare(
        use_ranks,
        kind.make,
        {"data": 2, "fsdp": 2, "tensor": 2},
        kind.optimizer,
        kind.data(np.random.default_rng(0)),
        sharding_rules=kind.rules,
    )
    assert is_cut(model, "tensor")
    assert is_cut(model, "fsdp")


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    # Moments of almost nothing would multiply the rounding of sums.
    "adam": lambda: optax.adam(1e-3, eps=1e-4),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "ema": averaged_sgd,
}


@pytest.mark.long  # Forty programs; test_sharded_training has each optimizer with the MLP.
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", [name for name in KINDS if name != "mlp"])
def test_every_optimizer_trains_every_model_as_one_device(use_ranks, name, optimizer):
    kind = KINDS[name]
    data = kind.data(np.random.default_rng(0))
    compare(use_ranks, kind.make, {"data": 2, "fsdp": 2}, OPTIMIZERS[optimizer], data)


@pytest.mark.long
def test_a_residual_network_equals_one_device(use_ranks):
    kind = KINDS["resnet"]
    data = kind.data(np.random.default_rng(0))
    compare(use_ranks, kind.make, {"data": 2, "fsdp": 4}, kind.optimizer, data)


def test_fresh_variables_are_made_in_parts_and_equal_those_of_init(use_ranks):
    use_ranks(4)
    model = tnt.Model(nn.Dense(64), seed=3, mesh={"fsdp": 4})
    model.build((None, WIDTH))
    kernel = model.state.params["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(WIDTH, 16)}
    expected = nn.Dense(64).init(jax.random.key(3), np.zeros((1, WIDTH), np.float32))
    np.testing.assert_allclose(kernel, expected["params"]["kernel"], rtol=1e-6)
