"""A sharded model trains to the numbers of a plain loop on one device, whatever the mesh."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from training import assert_close

import tnt_jax as tnt
from tnt_jax.distributed.sums.hlo import read_planned

pytestmark = pytest.mark.parametrize("what_moves", ["parameters", "rows"], indirect=True)

TOLERANCE = 1e-5
ROWS, SIZE, WIDTH, CLASSES = 27, 8, 32, 5


class Net(nn.Module):
    """Layers wide enough to be cut, dropout, and biases that stay whole."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        x = nn.LayerNorm()(nn.relu(nn.Dense(WIDTH)(x)))
        return nn.Dense(CLASSES)(x)


def make_data(rows=ROWS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return x, rng.integers(0, CLASSES, rows).astype(np.int32)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1)),
    "lamb": lambda: optax.lamb(0.01),
    "ema": lambda: tnt.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
}


def crossentropy():
    return tnt.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(net, optimizer, *, rows=ROWS, epochs=2, compile_options=None, **options):
    x, y = make_data(rows)
    model = tnt.Model(net, **options)
    model.compile(optimizer, loss=crossentropy(), metrics=["accuracy"], **(compile_options or {}))
    history = model.fit(x, y, batch_size=SIZE, epochs=epochs, shuffle=False, verbose=0).history
    return model, history


def train_plainly(net, optimizer, *, epochs=2):
    """Trains with a loop on one device, on Flax and Optax alone; returns history and parameters."""
    x, y = make_data()
    params = net.init(jax.random.key(0), x[:1])["params"]
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        def loss_of(params):
            logits = net.apply({"params": params}, x)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(epochs):
        total = 0.0
        for i in range(0, ROWS, SIZE):
            params, state, loss = step(params, state, x[i : i + SIZE], y[i : i + SIZE])
            total += float(loss) * len(y[i : i + SIZE])
        losses.append(total / ROWS)
    return losses, params


TENSOR = [
    ("Dense_0/kernel", (None, "tensor")),
    ("Dense_0/bias", ("tensor",)),
    ("Dense_1/kernel", ("tensor", None)),
]


def train_on(mesh, optimizer, net=None, **options):
    rules = TENSOR if "tensor" in mesh else ()
    return train(net or Net(), OPTIMIZERS[optimizer](), mesh=mesh, sharding_rules=rules, **options)


@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        pytest.param("sgd", {"data": 2, "fsdp": 4}, marks=pytest.mark.long),
        pytest.param("clipping", {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.long),
    ],
)
def test_training_equals_a_plain_loop(use_ranks, optimizer, mesh):
    use_ranks(8)
    losses, params = train_plainly(Net(), OPTIMIZERS[optimizer]())
    model, history = train_on(mesh, optimizer)
    assert_close(history["loss"], losses)
    assert_close(model.variables["params"], params)


@cache
def on_one_device(optimizer):
    tnt.shutdown()
    tnt.init(devices=[0])
    model, history = train(Net(dropout=0.3), OPTIMIZERS[optimizer]())
    return history, model.get_weights()


# A dozen programs; the test above has each kind of mesh and of optimizer.
@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 2}, {"tensor": 2}, {"fsdp": 8}], ids=str)
def test_every_optimizer_equals_one_device(use_ranks, mesh, optimizer, request):
    if optimizer == "lamb" and request.node.callspec.params["what_moves"] == "rows":
        pytest.skip("LAMB's ratios of norms multiply the rounding of the compiler's sums: 1.3e-5")
    history, weights = on_one_device(optimizer)
    use_ranks(math.prod(mesh.values()))
    model, found = train_on(mesh, optimizer, Net(dropout=0.3))
    assert_close(found, history)
    assert_close(model.get_weights(), weights)


def results_of_options(num_devices, **options):
    """Returns history, weights and predictions; two steps are one program, and the last is alone."""
    tnt.shutdown()
    tnt.init(devices=range(num_devices))
    optimizer = tnt.optimizers.Adam(0.01, gradient_accumulation_steps=3)
    model, history = train(
        Net(dropout=0.4), optimizer, rows=19, compile_options={"steps_per_execution": 2}, **options
    )
    return history, model.get_weights(), model.predict(make_data()[0], verbose=0)


@pytest.fixture(scope="module")
def options_on_one_device():
    return results_of_options(1)


def test_dropout_accumulation_and_several_steps_a_program_equal_one_device(options_on_one_device):
    found = results_of_options(8, mesh={"data": 2, "fsdp": 4})
    assert_close(found, options_on_one_device)


@pytest.mark.long  # Two programs in half precision; the gathering itself is tested beside.
def test_half_precision_equals_data_parallelism(use_ranks):
    # On as many ranks, each of which rounds its gradients to bfloat16 before they are summed.
    use_ranks(4)
    whole, expected = train(Net(), optax.sgd(0.1), precision="mixed_bfloat16")
    model, history = train(Net(), optax.sgd(0.1), precision="mixed_bfloat16", mesh={"fsdp": 4})
    assert_close(history, expected)
    assert_close(model.get_weights(), whole.get_weights())


@pytest.mark.parametrize(
    "optimizer",
    ["adam", pytest.param(optax.adam(1e-3), marks=pytest.mark.long)],
    ids=["keras", "optax"],
)
def test_each_device_holds_its_part_of_the_state(use_ranks, optimizer):
    use_ranks(8)
    x, y = make_data(SIZE)
    net = nn.Sequential([nn.Dense(1024), nn.relu, nn.Dense(CLASSES * 8)])
    model = tnt.Model(net, mesh={"fsdp": 8})
    model.compile(optimizer, loss=crossentropy())
    model.fit(x, y, batch_size=SIZE, epochs=1, verbose=0)
    state = model.state
    leaves = jax.tree.leaves((state.params, state.opt_state))
    whole = sum(leaf.nbytes for leaf in leaves)
    for device in jax.devices():
        held = sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        assert math.isclose(held, whole / 8, rel_tol=0.05)


@pytest.mark.long  # As for whole parameters: they are model state.
def test_frozen_parameters_do_not_change(use_ranks):
    use_ranks(1)
    whole, expected = train(Net(), optax.sgd(0.1), frozen=["Dense_0"])
    weights = whole.get_weights()
    use_ranks(4)
    model, history = train(Net(), optax.sgd(0.1), frozen=["Dense_0"], mesh={"data": 2, "fsdp": 2})
    assert_close(history, expected)
    assert_close(model.get_weights(), weights)


def test_batch_statistics_of_ranks_are_refused_and_those_of_whole_batches_are_one_devices(
    use_ranks, request
):
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x))
            return nn.Dense(CLASSES)(x)

    def fit(**options):
        model, history = train(Normalized(), optax.sgd(0.1), **options)
        return model.get_weights(), history

    if request.node.callspec.params["what_moves"] == "rows":
        use_ranks(1)
        expected = fit()
        use_ranks(4)
        assert_close(fit(mesh={"fsdp": 4}), expected)
        return
    use_ranks(4)
    with pytest.raises(
        ValueError, match=r"model state batch_stats/BatchNorm_0/mean \[64\].*axis_n"
    ):
        fit(mesh={"fsdp": 4})


def test_a_state_that_is_put_back_stays_readable(use_ranks):
    use_ranks(4)
    x, y = make_data(3 * SIZE)
    optimizer = tnt.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model, _ = train(Net(), optimizer, rows=3 * SIZE, mesh={"fsdp": 4}, epochs=1)
    kept = model.state
    expected = jax.tree.map(np.array, kept)
    model.set_state(kept)
    model.fit(x, y, batch_size=SIZE, epochs=1, verbose=0)
    jax.tree.map(np.testing.assert_array_equal, kept, expected)


def test_meshes_leave_the_program_of_plain_data_parallelism_as_it_is(use_ranks):
    x, y = make_data()
    use_ranks(4)

    def program(**options):
        model = tnt.Model(Net(dropout=0.3), **options)
        model.compile(optax.sgd(0.1), loss=crossentropy())
        return model.lowered_text(x, y, batch_size=SIZE)

    before = program()
    assert program(mesh={"data": 2, "fsdp": 2}) != before
    assert program() == before
    kinds = {kind for kind, _ in read_planned(before)}
    assert kinds == {"all-reduce"}
    # Whole parameters go in and come out; nothing is moved between devices but sums.
    assert "sharding_constraint" not in before
    assert "optimization_barrier" not in before
