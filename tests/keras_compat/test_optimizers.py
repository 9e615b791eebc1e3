"""Optimizers: twenty steps beside the real Keras optimizer, and what a training loop asks of
them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from keras_beside import (
    apply_keras,
    by_dense,
    fit,
    keras_model,
    linen_model,
    skip_on_oldest_keras,
)

from tnt_jax.keras_compat import optimizers

STEPS = 20
CASES = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "beta_1": 0.8}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adadelta", {"learning_rate": 1.0}),
    ("Adagrad", {}),
    ("Adamax", {}),
    ("Nadam", {}),
    ("Lion", {}),
    ("Lamb", {}),
    ("Adafactor", {}),
    ("Adafactor", {"learning_rate": 0.5}),
    ("Ftrl", {}),
    (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "l1_regularization_strength": 0.3,
            "l2_regularization_strength": 0.2,
            "beta": 0.5,
        },
    ),
    (
        "Ftrl",
        {
            "l2_shrinkage_regularization_strength": 0.1,
            "learning_rate_power": -0.3,
            "initial_accumulator_value": 0.5,
        },
    ),
    ("ScheduleFreeAdamW", {}),
    (
        "ScheduleFreeAdamW",
        {"learning_rate": 0.01, "warmup_steps": 7, "weight_decay": 0.01, "beta_1": 0.95},
    ),
    ("Muon", {}),
    ("Muon", {"exclude_layers": ["kernel"], "nesterov": False, "rms_rate": None}),
]
COMMON = [
    {"clipnorm": 0.5},
    {"clipvalue": 0.1},
    {"global_clipnorm": 0.7},
    {"weight_decay": 0.05},
    {"use_ema": True, "ema_momentum": 0.9},
    {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in settings.items())}" for name, settings in CASES]


SHAPES = {
    "embedding": (6, 3),
    "kernel": (4, 5),
    "tall": (7, 2),
    "conv": (2, 3, 4),
    "bias": (5,),
    "scale": (),
}


def shapes_for(name):
    """Returns names of arrays: all of them where a rule depends on the shape."""
    return list(SHAPES) if name in ("Adafactor", "Lamb", "Muon") else ["kernel", "bias"]


def params_and_grads(names=("kernel", "bias")):
    """Returns parameters of several ranks and twenty gradients, each array random; one gradient is
    zero everywhere.
    """
    rng = np.random.default_rng(0)

    def draw():
        return {name: np.asarray(rng.normal(size=SHAPES[name]), "float32") for name in names}

    grads = [draw() for _ in range(STEPS)]
    grads[3] = jax.tree.map(np.zeros_like, grads[3])
    return draw(), grads


def train(optimizer, params, grads):
    transformation = optimizer.transformation()
    state = transformation.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


def train_keras(optimizer, params, grads):
    keras = pytest.importorskip("keras")
    variables = {name: keras.Variable(value, name=name) for name, value in params.items()}
    optimizer.build(list(variables.values()))
    apply_keras(
        optimizer, [[grad[name] for name in variables] for grad in grads], variables.values()
    )
    return variables, optimizer


def assert_close(params, variables, tolerance=1e-6):
    for name, variable in variables.items():
        np.testing.assert_allclose(
            params[name], np.asarray(variable.value), rtol=tolerance, atol=tolerance, err_msg=name
        )


def keras_optimizer(name, settings):
    keras = pytest.importorskip("keras")
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"Keras {keras.__version__} has no {name}.")
    if name == "Muon":
        skip_on_oldest_keras("computes Muon otherwise")
    return getattr(keras.optimizers, name)(**settings)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_twenty_steps_equal_keras(name, settings):
    params, grads = params_and_grads(shapes_for(name))
    variables, _ = train_keras(keras_optimizer(name, settings), params, grads)
    trained, _ = train(getattr(optimizers, name)(**settings), params, grads)
    assert_close(trained, variables)


@pytest.mark.parametrize(
    ("name", "common"),
    [
        pytest.param(
            name, common, id=f"{name}-{'-'.join(common)}", marks=[] if runs else pytest.mark.long
        )
        for i, common in enumerate(COMMON)
        # The base class honours them: by default, each for SGD and one of the others.
        for j, name in enumerate(["SGD", "Adam", "Lamb", "Ftrl"])
        for runs in [j in (0, 1 + i % 3)]
    ],
)
def test_common_options_equal_keras(name, common):
    settings = {"learning_rate": 0.01, **common}
    params, grads = params_and_grads()
    variables, theirs = train_keras(keras_optimizer(name, settings), params, grads)
    ours = getattr(optimizers, name)(**settings)
    trained, state = train(ours, params, grads)
    assert_close(trained, variables)
    if ours.use_ema:
        theirs.finalize_variable_values(list(variables.values()))
        assert_close(ours.averaged_params(state), variables)


def test_weights_named_in_an_exclusion_are_not_decayed():
    params, grads = params_and_grads(["kernel", "bias", "scale"])
    theirs, ours = (
        make(name="a", learning_rate=0.1, weight_decay=0.1) for make in (keras_sgd, optimizers.SGD)
    )
    for optimizer in (theirs, ours):
        optimizer.exclude_from_weight_decay(var_names=["bias", "sca"])
    variables, _ = train_keras(theirs, params, grads)
    trained, _ = train(ours, params, grads)
    assert_close(trained, variables)


def keras_sgd(**settings):
    return keras_optimizer("SGD", settings)


def test_variables_of_keras_are_exempt_by_their_paths():
    keras = pytest.importorskip("keras")
    layer = keras.layers.Dense(3, name="head")
    layer.build((None, 2))
    optimizer = optimizers.SGD(weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[layer.bias])
    assert (
        optimizer.is_exempt("head/bias"),
        optimizer.is_exempt("ahead/bias"),
        optimizer.is_exempt("head/kernel"),
    ) == (
        True,
        False,
        False,
    )
    with pytest.raises(
        TypeError, match=r"var_list takes Keras variables, which have a path, but holds a int"
    ):
        optimizer.exclude_from_weight_decay(var_list=[1])


def test_exclusion_searches_the_whole_path_and_its_last_part():
    optimizer = optimizers.SGD(weight_decay=0.5)
    optimizer.exclude_from_weight_decay(["^bias$", "norm"])
    params = {"dense": {"bias": 1.0, "kernel": 1.0}, "norm": {"scale": 1.0}}
    decays = jax.tree_util.tree_map_with_path(
        lambda path, p: optimizer.decay_of(
            p, jax.tree_util.keystr(path, simple=True, separator="/")
        ),
        params,
    )
    assert decays == {"dense": {"bias": 0.0, "kernel": 0.5}, "norm": {"scale": 0.0}}


def test_a_schedule_is_asked_for_the_number_of_updates_made():
    schedule = lambda step: 0.1 / (1 + step)  # noqa: E731
    transformation = optimizers.SGD(schedule).transformation()
    state, seen = transformation.init(jnp.ones(2)), []
    for _ in range(3):
        update, state = transformation.update(jnp.ones(2), state, jnp.ones(2))
        seen.append(-float(update[0]))
    np.testing.assert_allclose(seen, [0.1, 0.05, 0.1 / 3], rtol=1e-6)
    np.testing.assert_allclose(optimizers.read_learning_rate(state), 0.1 / 3, rtol=1e-6)
    with pytest.raises(TypeError, match="A schedule decides the learning rate"):
        optimizers.write_learning_rate(state, 0.1)


def test_a_rate_may_be_a_function_without_arguments():
    params, grads = params_and_grads()
    variables, _ = train_keras(keras_sgd(learning_rate=lambda: 0.05), params, grads)
    assert_close(train(optimizers.SGD(lambda: 0.05), params, grads)[0], variables)


def test_the_decay_of_keras_2_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="decay is no longer supported and is ignored"):
        optimizers.Adam(decay=0.1)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: optax.chain(optax.identity(), t)])
def test_learning_rate_is_set_in_the_state_without_a_new_trace(wrap):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.NamedSharding(mesh, P())
    transformation = wrap(optimizers.SGD(0.1).transformation())
    params = jax.device_put({"w": jnp.ones(3)}, replicated)
    state = jax.device_put(transformation.init(params), replicated)
    traces = []

    @jax.jit
    def update(grads, state, params):
        traces.append(1)
        return transformation.update(grads, state, params)

    first, state = update(params, state, params)
    rewritten = optimizers.write_learning_rate(state, 0.05)
    second, state = update(params, rewritten, params)
    np.testing.assert_allclose(first["w"], -0.1, rtol=1e-6)
    np.testing.assert_allclose(second["w"], -0.05, rtol=1e-6)
    assert float(optimizers.read_learning_rate(state)) == pytest.approx(0.05)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"use_ema": True, "ema_momentum": 0.8},
        {"clipnorm": 0.1, "weight_decay": 0.1},
        {"loss_scale_factor": 1024.0},
    ],
)
def test_schedules_and_averages_count_accumulating_steps_as_keras_does(options):
    keras = pytest.importorskip("keras")
    schedule = keras.optimizers.schedules.PolynomialDecay(0.2, 20, power=0.5)
    settings = {"learning_rate": schedule, "gradient_accumulation_steps": 3, **options}
    theirs, model = keras_model(**settings), linen_model(keras_model(**settings), **settings)
    for trained in (theirs, model):
        # 15 steps of 5 updates: the averages of Keras move in every step.
        fit(trained, None, epochs=3, validation_data=None)
    assert_weights_close(by_dense(theirs.get_weights()), model.get_weights())
    assert float(theirs.optimizer.learning_rate) == pytest.approx(model.optimizer.learning_rate)


def assert_weights_close(expected, weights):
    for mine, theirs in zip(weights, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6, rtol=1e-5)


def test_optax_transformations_are_taken_as_they_are():
    plain = optax.sgd(0.1)
    optimizer = optimizers.get(plain)
    assert optimizer.transformation() is plain
    state = plain.init(jnp.ones(2))
    assert optimizers.read_learning_rate(state) is None
    with pytest.raises(ValueError, match=r"holds no learning rate to set.*inject_hyperparams"):
        optimizers.write_learning_rate(state, 0.1)
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    state = optimizers.write_learning_rate(injected.init(jnp.ones(2)), 0.2)
    assert float(optimizers.read_learning_rate(state)) == pytest.approx(0.2)


def test_updates_are_replicated_inside_shard_map():
    params, grads = params_and_grads()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = optimizers.Nadam(use_ema=True, global_clipnorm=1.0, weight_decay=0.1)
    transformation = optimizer.transformation()

    def step(params, state, grads):
        updates, state = transformation.update(jax.lax.psum(grads, "data"), state, params)
        return optax.apply_updates(params, updates), state

    split = jax.tree.map(lambda g: np.stack([g / 4] * 4), grads[0])
    squeezed = lambda p, s, g: step(p, s, jax.tree.map(lambda x: x[0], g))  # noqa: E731
    mapped = jax.jit(
        jax.shard_map(squeezed, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    )
    trained, _ = mapped(params, transformation.init(params), split)
    expected, _ = train(optimizer, params, grads[:1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), trained, expected
    )


@pytest.mark.parametrize(("name", "settings"), CASES[::3], ids=IDS[::3])
def test_half_precision_weights_keep_their_type_and_move(name, settings):
    params, grads = params_and_grads(shapes_for(name))
    half, half_grads = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, grads))
    trained, state = train(
        getattr(optimizers, name)(**{**settings, "learning_rate": 0.05}), half, half_grads
    )
    expected, _ = train(
        getattr(optimizers, name)(**{**settings, "learning_rate": 0.05}), params, grads
    )
    for key, value in trained.items():
        assert value.dtype == jnp.bfloat16
        value = np.asarray(value, "float32")
        assert np.all(np.isfinite(value))
        moved = np.linalg.norm(expected[key] - params[key])
        assert np.linalg.norm(value - expected[key]) < 0.35 * moved + 0.02 * np.linalg.norm(
            params[key]
        )
    slots = jax.tree.leaves(state.inner_state.slots)
    assert all(slot.dtype == jnp.bfloat16 for slot in slots)


def test_get():
    for name in ("adam", "Adam", "ADAM", "sgd", "rmsprop", "adamw", "lamb", "muon"):
        assert type(optimizers.get(name)).__name__.lower() == name.lower()
    instance = optimizers.SGD(0.1, 0.9)
    assert optimizers.get(instance) is instance
    assert isinstance(optimizers.get(optimizers.Lion), optimizers.Lion)
    with pytest.raises(
        ValueError,
        match=r"Unknown optimizer 'adan'. Did you mean 'adam'\? Known names: adadelta, "
        r"adafactor, adagrad, adam,",
    ):
        optimizers.get("adan")
    with pytest.raises(
        ValueError,
        match=r"must be a name, a tnt_jax.optimizers object, an Optax transformation or a Keras",
    ):
        optimizers.get(0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"clipnorm": 1.0, "clipvalue": 1.0},
            r"Only one of clipnorm, clipvalue and global_clipnorm may be given",
        ),
        ({"ema_momentum": 1.5}, r"ema_momentum must be in \[0, 1\], got 1.5"),
        ({"ema_overwrite_frequency": 0}, "ema_overwrite_frequency must be at least 1"),
        ({"momentum": 2.0}, r"momentum must be in \[0, 1\]"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        optimizers.SGD(**settings)


def test_missing_parameters_and_averages_are_named():
    optimizer = optimizers.SGD()
    transformation = optimizer.transformation()
    state = transformation.init(jnp.ones(2))
    with pytest.raises(
        ValueError, match="'sgd' keeps no averaged weights: create it with use_ema=True"
    ):
        optimizer.averaged_params(state)
    with pytest.raises(ValueError, match=r"learning_rate must be a number or a schedule"):
        optimizers.SGD(np.ones(2))
