"""The same small model and data for Keras and for tnt_jax, and a record of what callbacks see."""

import flax.linen as nn
import jax
import keras
import numpy as np
import pytest

import tnt_jax as tnt

HOOKS = [
    f"on_{phase}_{moment}" for phase in ("train", "test", "epoch") for moment in ("begin", "end")
] + [f"on_{phase}_batch_{moment}" for phase in ("train", "test") for moment in ("begin", "end")]


def skip_on_oldest_keras(how):
    """Skips a test in which the oldest Keras that is supported differs from later ones."""
    if keras.__version__.startswith("3.12."):
        pytest.skip(f"Keras {keras.__version__} {how}.")


def computed(function, *arrays):
    """Returns what `function` does in one program: alone, each operation is a program to compile."""
    return jax.jit(function)(*arrays)


def apply_keras(optimizer, grads, variables):
    """Applies gradients of several steps to the variables of a built Keras optimizer, in place."""
    step = jax.jit(optimizer.stateless_apply)
    values, state = ([v.value for v in some] for some in (variables, optimizer.variables))
    for grad in grads:
        values, state = step(state, grad, values)
    for some, found in ((variables, values), (optimizer.variables, state)):
        for variable, value in zip(some, found, strict=True):
            variable.assign(value)


def by_keras(metric, batches):
    """Returns the result of a Keras metric after batches of targets, outputs and weights."""
    state = [variable.value for variable in metric.variables]
    for y_true, y_pred, weight in batches:
        state = metric.stateless_update_state(state, y_true, y_pred, sample_weight=weight)
    return metric.stateless_result(state)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(x)


class Recorder(keras.callbacks.Callback):
    """Writes down every call with a copy of its logs; a real Keras callback on both sides."""

    def __init__(self):
        super().__init__()
        self.calls = []


def _record(hook):
    def call(self, *args, logs=None):
        *numbers, last = (
            (*args, logs)
            if logs is not None or not args or not hasattr(args[-1], "items")
            else args
        )
        self.calls.append((hook, *numbers, dict(last or {})))

    return call


for _hook in HOOKS:
    setattr(Recorder, _hook, _record(_hook))


def data(num_examples=40, *, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, 4)).astype(np.float32)
    labels = np.argmax(x[:, :3] + 0.3 * rng.normal(size=(num_examples, 3)), axis=1)
    return x, labels.astype(np.int32)


def keras_model(**sgd):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    )
    model.compile(
        keras.optimizers.SGD(**{"learning_rate": 0.1, **sgd}),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def linen_model(like, **sgd):
    kernel0, bias0, kernel1, bias1 = like.get_weights()
    params = {
        "Dense_0": {"kernel": kernel0, "bias": bias0},
        "Dense_1": {"kernel": kernel1, "bias": bias1},
    }
    model = tnt.Model(Net(), variables={"params": params})
    compile_linen(model, **sgd)
    return model


def compile_linen(model, **sgd):
    model.compile(
        tnt.optimizers.SGD(**{"learning_rate": 0.1, **sgd}),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def by_dense(weights):
    """Orders weights as Linen does: the bias of a layer before its kernel."""
    return [weights[1], weights[0], weights[3], weights[2]]


def fit(model, callbacks, *, epochs=4, **options):
    x, y = data()
    arguments = {
        "batch_size": 8,
        "shuffle": False,
        "verbose": 0,
        "validation_data": data(16, seed=1),
    } | options
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **arguments)


def assert_same_calls(ours, keras_calls, *, atol=1e-6):
    assert [call[:-1] for call in ours] == [call[:-1] for call in keras_calls]
    for (*call, logs), (*_, expected) in zip(ours, keras_calls, strict=True):
        assert set(logs) == set(expected), call
        for name, value in expected.items():
            np.testing.assert_allclose(
                logs[name], value, atol=atol, rtol=1e-5, err_msg=f"{call} {name}"
            )
