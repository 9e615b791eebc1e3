"""What a Keras model and its optimizer can carry is honoured, as `keras_model.fit` does, or
refused; see docs/keras_models.md.
"""

import keras
import numpy as np
import pytest
from keras import layers
from long_params import long_but_last

import tnt_jax as tnt
from tnt_jax.train.finite import loss_scale

TOLERANCE = 1e-5
ROWS, FEATURES, CLASSES = 24, 5, 3
K = keras.optimizers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, FEATURES)).astype("float32"), RNG.integers(0, CLASSES, ROWS)


def sequential(*inner, policy="float32"):
    keras.config.set_dtype_policy(policy)
    try:
        return keras.Sequential(
            [keras.Input((FEATURES,)), *(make() for make in inner), layers.Dense(CLASSES)]
        )
    finally:
        keras.config.set_dtype_policy("float32")


def plain():
    return sequential(lambda: layers.Dense(8, name="FC1"))


def constrained(constraint):
    return lambda: sequential(
        lambda: layers.Dense(8, kernel_constraint=constraint, bias_constraint="non_neg")
    )


def partly_frozen():
    inner = keras.Sequential([layers.Dense(6), layers.Dense(6)])
    model = sequential(lambda: inner)
    inner.layers[0].trainable = False
    return model


def half():
    return sequential(lambda: layers.Dense(8, use_bias=False), policy="mixed_float16")


def decaying(exempt):
    def make(model):
        optimizer = K.SGD(0.1, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(**exempt(model))
        return optimizer

    return make


class Tripled(keras.optimizers.Optimizer):
    def __init__(self, learning_rate=0.1, factor=3.0, **options):
        super().__init__(learning_rate, **options)
        self.factor = factor

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, self.factor * learning_rate * gradient)


class Described(Tripled):
    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


# Where two features stand together, each bites.
HONOURED = {
    "unit norm": (constrained(keras.constraints.UnitNorm()), lambda _: K.SGD(0.5, momentum=0.9)),
    "largest norm": (
        constrained(keras.constraints.MaxNorm(0.7)),
        lambda _: tnt.optimizers.SGD(0.5),
    ),
    "constraint beside averages": (
        constrained("non_neg"),
        lambda _: K.SGD(0.5, use_ema=True, ema_momentum=0.5),
    ),
    "constraint beside overwriting": (
        constrained("non_neg"),
        lambda _: K.SGD(0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    ),
    "loss_scale_factor beside clipvalue": (
        plain,
        lambda _: K.SGD(0.1, loss_scale_factor=64.0, clipvalue=0.01),
    ),
    "LossScaleOptimizer beside global_clipnorm": (
        plain,
        lambda _: K.LossScaleOptimizer(K.SGD(0.1, global_clipnorm=0.05), dynamic_growth_steps=3),
    ),
    "accumulation and a schedule": (
        plain,
        lambda _: K.SGD(
            K.schedules.ExponentialDecay(0.5, 2, 0.5),
            gradient_accumulation_steps=2,
            clipnorm=0.05,
            weight_decay=0.05,
        ),
    ),
    "activity regularizer beside weight decay but for names": (
        lambda: sequential(lambda: layers.Dense(8, activity_regularizer="l2")),
        decaying(lambda model: {"var_names": ["bias"]}),
    ),
    "weight decay but for variables": (
        plain,
        decaying(lambda model: {"var_list": [model.get_layer("FC1").kernel]}),
    ),
    "Ftrl": (plain, lambda _: K.Ftrl(0.1)),
    "a scaled loss with constraints": (
        constrained("non_neg"),
        lambda _: K.LossScaleOptimizer(K.SGD(0.5), initial_scale=2.0**127),
    ),
    "sublayers that are not trained": (partly_frozen, lambda _: K.SGD(0.1)),
    "an optimizer of the user's": (plain, lambda _: Described(0.05, factor=2.0)),
}


def fit(model, optimizer, epochs=2, sample_weight=None, **options):
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    data = {"x": X, "y": Y, "sample_weight": sample_weight}
    return model.fit(**data, batch_size=6, epochs=epochs, shuffle=False, verbose=0).history


def twins(build):
    """Returns two models of equal weights."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        models.append(build())
    return models


def assert_same(ours, theirs, tolerance=TOLERANCE):
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("feature", HONOURED)
def test_honoured_as_in_keras(use_ranks, feature):
    use_ranks(2)
    build, make_optimizer = HONOURED[feature]
    ours, theirs = twins(build)
    start = ours.get_weights()
    optimizer = make_optimizer(theirs)
    expected = fit(
        theirs, K.SGD(0.5) if isinstance(optimizer, tnt.optimizers.Optimizer) else optimizer
    )
    history = fit(tnt.Model(ours), make_optimizer(ours))
    assert_same(ours, theirs)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=TOLERANCE)
    assert max(np.abs(a - b).max() for a, b in zip(start, ours.get_weights(), strict=True)) > 1e-3


@pytest.mark.parametrize(
    "options", [{}, {"shard_optimizer_state": True}, {"reproducible": True, "virtual_ranks": 2}]
)
def test_constraints_hold_exactly_in_every_kind_of_step(use_ranks, options):
    use_ranks(2)
    ours, theirs = twins(constrained("non_neg"))
    fit(theirs, K.SGD(0.5))
    fit(tnt.Model(ours, **options), K.SGD(0.5))
    assert_same(ours, theirs)
    assert ours.layers[0].kernel.numpy().min() == 0


def test_mixed_float16_learns_what_is_too_small_for_float16(use_ranks):
    use_ranks(1)
    ours, theirs, unscaled = *twins(half), twins(half)[0]
    start = ours.layers[0].kernel.numpy()
    # Gradients of 1e-9 are far below the smallest float16, 6e-8.
    weights = np.full(ROWS, 1e-8, np.float32)
    for model in (theirs, ours, unscaled):
        wrapped = model if model is theirs else tnt.Model(model)
        options = {"auto_scale_loss": False} if model is unscaled else {}
        fit(wrapped, K.SGD(1e6), sample_weight=weights, **options)
        if model is ours:
            assert float(loss_scale(wrapped.state.opt_state)) == 2.0**15
    assert np.abs(ours.layers[0].kernel.numpy() - start).max() > 1e-3
    assert_same(ours, theirs)
    np.testing.assert_array_equal(unscaled.layers[0].kernel.numpy(), start)


@pytest.mark.parametrize("name", ["m", "m.keras"])
def test_a_scaled_loss_comes_back_from_files(use_ranks, tmp_path, name):
    use_ranks(2)
    wrapped = tnt.Model(half())
    fit(
        wrapped,
        K.LossScaleOptimizer(K.SGD(0.1), dynamic_growth_steps=3)
        if name == "m"
        else K.SGD(0.1, momentum=0.9),
    )
    wrapped.save(tmp_path / name)
    read = tnt.models.load_model(tmp_path / name)
    assert float(loss_scale(read.state.opt_state)) == float(loss_scale(wrapped.state.opt_state))
    for model in (wrapped, read):
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    for a, b in zip(wrapped.get_weights(), read.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", long_but_last("mixed_bfloat16", "mixed_float16"))
def test_dtype_policies_train_as_in_keras(use_ranks, policy):
    use_ranks(2)
    ours, theirs = twins(lambda: sequential(lambda: layers.Dense(8), policy=policy))
    fit(theirs, K.SGD(0.1))
    fit(tnt.Model(ours), K.SGD(0.1))
    # Sums over half of the rows round differently in 16 bits.
    assert_same(ours, theirs, tolerance=1e-3)


@pytest.mark.parametrize(
    ("make", "through_a_file"),
    [
        (lambda: K.Adam(0.01), False),
        (lambda: K.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2), True),
    ],
)
def test_the_state_of_a_keras_optimizer_is_where_training_starts(
    use_ranks, tmp_path, make, through_a_file
):
    use_ranks(2)
    ours, theirs = twins(plain)
    for model in (ours, theirs):
        fit(model, make(), epochs=1)
    theirs.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    if through_a_file:
        ours.save(tmp_path / "m.keras")
        wrapped = tnt.models.load_model(tmp_path / "m.keras")
        wrapped.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        ours = wrapped.module
    else:
        fit(tnt.Model(ours), ours.optimizer)
    assert_same(ours, theirs)


# ---- Refused ----


def overriding(*names):
    def replacement(self, *args, **kwargs):
        raise AssertionError("It is not called.")

    cls = type("Own", (keras.Model,), dict.fromkeys(names, replacement))
    inputs = keras.Input((FEATURES,))
    return cls(inputs, layers.Dense(CLASSES)(inputs))


OF_A_STEP = [
    "train_step",
    "test_step",
    "compute_loss",
    "compute_metrics",
    "get_metrics_result",
    "make_train_function",
]


@pytest.mark.parametrize("name", OF_A_STEP)
def test_methods_that_a_step_would_not_call_are_refused(use_ranks, name):
    use_ranks(1)
    with pytest.raises(
        ValueError, match=rf"'own.*' overrides {name}, which would not be called.*objective="
    ):
        fit(tnt.Model(overriding(name)), "sgd")


def test_methods_that_a_step_would_not_call_stand_beside_an_objective(use_ranks):
    use_ranks(1)
    wrapped = tnt.Model(overriding(*OF_A_STEP))
    wrapped.compile(
        "sgd",
        objective=lambda params, batch, rngs, apply: (apply(params, batch.inputs) ** 2).mean(-1),
    )
    wrapped.fit(X, Y, batch_size=8, verbose=0)
    assert wrapped.predict(X, verbose=0).shape == (ROWS, CLASSES)


def test_a_method_that_prediction_would_not_call_is_refused(use_ranks):
    use_ranks(1)
    model = plain()
    model.predict_step = lambda *args: None
    wrapped = tnt.Model(model)
    fit(wrapped, "sgd")
    with pytest.raises(ValueError, match="overrides predict_step, which would not be called"):
        wrapped.predict(X, verbose=0)


def built_for_others():
    optimizer = K.SGD(0.1, momentum=0.9)
    optimizer.build([keras.Variable(np.zeros((2, 2)))])
    return optimizer


def exempting_foreign_variables():
    optimizer = K.SGD(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[keras.Variable(1.0)])
    return optimizer


class WithoutOptions(keras.optimizers.Optimizer):
    def __init__(self):
        super().__init__(0.1)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            built_for_others,
            r"was built for other variables than those trained now: it holds 3 arrays, and 6 are "
            r"needed",
        ),
        (
            exempting_foreign_variables,
            r"excludes variables from weight decay that do not belong to this model",
        ),
        (
            lambda: Tripled(factor=2.0),
            r"get_config\(\) of the Keras optimizer 'tripled.*' leaves out factor",
        ),
        (
            WithoutOptions,
            r"cannot be recreated from its get_config\(\): .*unexpected keyword argument",
        ),
        (
            lambda: K.SGD(use_ema=True, gradient_accumulation_steps=2),
            r"averages weights \(use_ema\) in each of its gradient_accumulation_steps",
        ),
    ],
)
def test_optimizers_that_cannot_be_followed_are_refused(use_ranks, optimizer, message):
    use_ranks(1)
    with pytest.raises(ValueError, match=message):
        fit(tnt.Model(plain()), optimizer())


def stateful():
    return keras.Sequential(
        [keras.Input((2, 3), batch_size=6), layers.LSTM(4, stateful=True), layers.Dense(CLASSES)]
    )


def in_float8():
    model = plain()
    model.quantize("float8")
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (stateful, "The layer 'lstm.*' of the Keras model .* is stateful"),
        (in_float8, "trains in float8: the scales .*scale"),
    ],
)
def test_models_that_cannot_be_followed_are_refused(use_ranks, build, message):
    use_ranks(1)
    model = build()
    with pytest.raises(ValueError, match=message):
        tnt.Model(model).predict(np.zeros((6, *model.input_shape[1:]), np.float32), verbose=0)


def test_weights_outside_their_constraint_are_refused_with_accumulation(use_ranks):
    use_ranks(2)
    optimizer = {"optimizer": K.SGD(0.5, gradient_accumulation_steps=2)}
    with pytest.raises(ValueError, match="starts outside its constraint"):
        fit(tnt.Model(constrained("non_neg")()), **optimizer)
    ours, theirs = twins(constrained("non_neg"))
    for model in (ours, theirs):
        model.set_weights([np.abs(weight) for weight in model.get_weights()])
    fit(theirs, K.SGD(0.5, gradient_accumulation_steps=2))
    fit(tnt.Model(ours), K.SGD(0.5, gradient_accumulation_steps=2))
    assert_same(ours, theirs)


def test_what_keras_itself_distributes_and_compiles(use_ranks, monkeypatch):
    use_ranks(1)
    model = plain()
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match=r"The Keras model's own compile\(\) does not count"):
        tnt.Model(model).fit(X, Y)
    with pytest.raises(ValueError, match="run_eagerly=True is not possible"):
        fit(tnt.Model(model), "sgd", run_eagerly=True)
    monkeypatch.setattr(keras.distribution, "distribution", lambda: object())
    with pytest.raises(ValueError, match=r"keras.distribution is set"):
        tnt.Model(model).predict(X, verbose=0)


class Magnitude(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        self.tracker.update_state(keras.ops.abs(x))
        return x


def test_a_metric_of_a_layer_called_loss_does_not_replace_the_loss():
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    model = tnt.Model(keras.Sequential([keras.Input((4,)), Magnitude(), dense]))
    model.compile("sgd", "mse")
    x, y = np.full((8, 4), 2, np.float32), np.ones((8, 1), np.float32)
    assert model.evaluate(x, y, verbose=0, return_dict=True) == {"loss": 49.0, "loss_1": 2.0}
    assert model.metrics_names == ["loss", "loss_1"]
    assert float(model.metrics_by_log["loss_1"].result()) == 0  # The layer's own, left as it was.
