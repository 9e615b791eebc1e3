"""Mistakes of a first hour: each is told before tracing, with what was expected, what came and what
to do.
"""

import traceback
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from flax import nnx

import tnt_jax as tnt

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Y = np.arange(16) % 3
ONE_HOT = np.eye(3, dtype=np.float32)[Y]
LOGITS = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
MOST_FRAMES, MOST_CHARACTERS = 8, 700


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


class Normalizing(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))


class OverAnotherAxis(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train, axis_name="batch")(x))


class OfTwo(nn.Module):
    @nn.compact
    def __call__(self, image, text, train: bool = False):
        return nn.Dense(3)(image + text)


class OfDict(nn.Module):
    @nn.compact
    def __call__(self, features):
        return nn.Dense(3)(features["image"])


class NnxOfDict(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

    def __call__(self, features):
        return self.linear(features["image"])


def fit(x=X, y=Y, *, module=None, loss=LOGITS, fit=None, **compile_arguments):
    model = tnt.Model(module or nn.Dense(3))
    model.compile("sgd", loss, **compile_arguments)
    model.fit(x, y, **({"batch_size": 8, "verbose": 0} | (fit or {})))
    return model


def numpy_metric(y_true, y_pred):
    return np.abs(np.asarray(y_pred)).mean(-1)


def if_loss(y_true, y_pred):
    return jnp.square(y_pred[:, 0]) if y_pred[0, 0] > 0 else jnp.abs(y_pred[:, 0])


def reversed_loss(y_pred, y_true):
    return jnp.square(y_pred[:, 0] - y_true)


ENDING_IN = {
    "softmax": nn.Sequential([nn.Dense(3), nn.softmax]),
    "sigmoid": nn.Sequential([nn.Dense(3), nn.sigmoid]),
}
FRAME = pd.DataFrame({"age": [1.0, 2.0] * 8, "town": ["Rome", "Oslo"] * 8})
RAGGED = np.array([[1.0], [1.0, 2.0]] * 8, dtype=object)

MISTAKES = {
    "text labels": (
        lambda: fit(y=np.array(["cat", "dog"] * 8)),
        "y holds text .*'cat'.*numpy.unique",
    ),
    "a list of labels": (lambda: fit(y=["cat", "dog"] * 8), "y holds text .*'cat'.*numpy.unique"),
    "a list of texts": (lambda: fit(["a cat", "a dog"] * 8), "x holds text .*'a cat'.*token ids"),
    "object labels": (
        lambda: fit(y=np.array(["cat", None] * 8)),
        "y holds text .*dtype object.*'cat'.*numpy.unique",
    ),
    "text labels in batches": (
        lambda: fit([(X, np.array(["cat", "dog"] * 8))], None, fit={"batch_size": None}),
        r"component \[1\] .*<U3",
    ),
    "no objects in weights": (
        lambda: fit(fit={"sample_weight": np.array([None] * 16)}),
        "sample_weight holds objects .*NoneType",
    ),
    "ragged rows": (lambda: fit(RAGGED), "x holds rows of different lengths.*Pad"),
    "dates": (
        lambda: fit(np.array(["2020-01-01"] * 16, "datetime64[D]")),
        "x holds objects .*date.*numbers",
    ),
    "rows in a list": (
        lambda: fit([[1.0, 2.0, 3.0]] * 5000, np.zeros(5000, int)),
        r"list of 5000 arrays of shape \(3,\).*asarray",
    ),
    "arrays in a list": (lambda: fit([np.ones(3)] * 16), "list of 16 arrays.*several inputs"),
    "one-hot rows in a list": (
        lambda: fit(y=list(ONE_HOT)),
        "y is a list of 16 arrays.*several outputs",
    ),
    "mixed frame": (lambda: fit(FRAME), r"x is a table.*age \(float64\), town .*get_dummies"),
    "categories": (
        lambda: fit(y=FRAME["town"].astype("category")),
        "y holds text .*'Rome'.*numpy.unique",
    ),
    "wide mixed frame": (
        lambda: fit(pd.concat([FRAME.add_suffix(str(i)) for i in range(40)], axis=1)),
        "and 74 more",
    ),
    "wrong key": (
        lambda: fit({"image": X, "txt": X}, module=OfTwo()),
        "takes image, text.*keys image, txt",
    ),
    "missing key": (lambda: fit({"image": X}, module=OfTwo()), "takes image, text.*keys image"),
    "wrong key within": (lambda: fit({"img": X}, module=OfDict()), "reads 'image'.*keys img"),
    "wrong key in NNX": (lambda: fit({"img": X}, module=NnxOfDict()), "reads 'image'.*keys img"),
    "other features": (
        lambda: fit().fit(X[:, :4], Y, verbose=0),
        r"inputs \[rows, 4\]; before, they were \[rows, 6\]",
    ),
    "other features to predict": (
        lambda: fit().predict(X[:, :4], verbose=0),
        r"inputs \[rows, 4\]; before",
    ),
    "dropout without flag": (
        lambda: fit(module=Dropping()),
        "applies dropout in evaluation.*Dropout_0.*flag.*train",
    ),
    "dropout without flag to predict": (
        lambda: tnt.Model(Dropping()).predict(X, verbose=0),
        "applies dropout",
    ),
    "batch norm without flag": (
        lambda: fit(module=Normalizing()),
        "BatchNorm that always trains.*flag",
    ),
    "NumPy metric": (lambda: fit(metrics=[numpy_metric]), "Metric 'numpy_metric'.*jax.numpy"),
    "NumPy loss": (
        lambda: fit(loss=numpy_metric),
        "Loss 'numpy_metric'.*jax.numpy.*NumPy, scikit-learn",
    ),
    "loss with if": (lambda: fit(loss=if_loss), "Loss 'if_loss'.*jax.numpy"),
    "reversed loss": (
        lambda: fit(loss=reversed_loss),
        r"takes \(y_pred, y_true\), outputs first.*Swap",
    ),
    "reversed metric of other arguments": (
        lambda: fit(metrics=[[partial(reversed_loss)]]),
        "outputs first",
    ),
    "reversed metric": (lambda: fit(metrics=[reversed_loss]), "outputs first"),
    "metrics by position": (
        lambda: tnt.Model(nn.Dense(3)).compile("adam", "mse", ["accuracy"]),
        "loss_weights.*metrics=",
    ),
    "metric of indices": (
        lambda: fit(
            y=ONE_HOT, loss=tnt.losses.CategoricalCrossentropy(from_logits=True), metrics=[LOGITS]
        ),
        "Metric 'sparse_categorical_crossentropy' needs integer labels.*One-hot",
    ),
    "accuracy of indices": (
        lambda: fit(
            y=ONE_HOT,
            loss=tnt.losses.CategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        ),
        "Metric 'sparse_categorical_accuracy' needs integer labels.*'accuracy'",
    ),
    "validation inputs of other rank": (
        lambda: fit(fit={"validation_data": (X[:, :, None], Y)}),
        r"validation_data.*\[rows, 6, 1\]",
    ),
    "validation targets of other rank": (
        lambda: fit(fit={"validation_data": (X, ONE_HOT)}),
        "validation_data does not fit.*needs integer labels",
    ),
    "validation without targets": (
        lambda: fit(fit={"validation_data": X}),
        "validation_data.*holds no targets",
    ),
    "softmax for logits": (
        lambda: fit(module=ENDING_IN["softmax"]),
        "expects logits, but the model ends with a softmax",
    ),
    "sigmoid for logits": (
        lambda: fit(
            y=ONE_HOT,
            module=ENDING_IN["sigmoid"],
            loss=tnt.losses.BinaryCrossentropy(from_logits=True),
        ),
        r"ends with a sigmoid.*BinaryCrossentropy\(from_logits=False\)",
    ),
    "softmax for Optax": (
        lambda: fit(
            module=ENDING_IN["softmax"], loss=optax.softmax_cross_entropy_with_integer_labels
        ),
        "expects logits, but the model ends with a softmax.*Leave the softmax out of the model.$",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_a_few_lines(name, use_ranks):
    use_ranks(2)
    attempt, message = MISTAKES[name]
    with pytest.raises(ValueError, match=f"(?s){message}") as caught:
        attempt()
    frames = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    below = len(frames) - 1 - max(index for index, file in enumerate(frames) if file == __file__)
    assert 0 < below <= MOST_FRAMES, frames
    assert len(str(caught.value)) <= MOST_CHARACTERS
    assert caught.value.__context__ is None or caught.value.__suppress_context__


FLAGS = {
    "train": True, "training": True, "is_training": True, "is_train": True,
    "inference": False, "eval_mode": False, "deterministic": False, "use_running_average": False,
}  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("kind", ["Linen", "NNX"])
def test_a_flag_has_the_value_of_its_name(flag, kind, use_ranks):
    use_ranks(1)
    namespace = {"nn": nn, "nnx": nnx, "jnp": jnp}
    body = f"def __call__(self, x, *, {flag}): return 0 * self.linear(x).sum(-1) + (1.0 if {flag} is {FLAGS[flag]} else 2.0)"
    if kind == "Linen":
        exec(
            f"class Told(nn.Module):\n  def setup(self): self.linear = nn.Dense(1)\n  {body}",
            namespace,
        )
        module = namespace["Told"]()
    else:
        init = "def __init__(self): self.linear = nnx.Linear(6, 1, rngs=nnx.Rngs(0))"
        exec(f"class Told(nnx.Module):\n  {init}\n  {body}", namespace)
        module = namespace["Told"]()
    model = tnt.Model(module)
    model.compile("sgd", lambda targets, outputs: outputs)
    assert model.fit(X, Y, verbose=0).history["loss"] == [1.0]
    assert model.evaluate(X, Y, verbose=0) == 2.0
    np.testing.assert_array_equal(model.predict(X, verbose=0), 2.0)


class BothFlags(nn.Module):
    @nn.compact
    def __call__(self, x, *, train, deterministic):
        assert train is not deterministic
        return nn.Dense(3)(x)


def test_several_flags_are_all_set(use_ranks):
    use_ranks(1)
    model = fit(module=BothFlags())
    assert model.optimizer.iterations > 0
    assert model.predict(X, verbose=0).shape == (len(X), 3)


def test_logits_that_look_like_probabilities_and_probabilities_for_their_loss_are_trained(
    use_ranks,
):
    use_ranks(1)
    for model in (
        fit(module=nn.Sequential([nn.Dense(3), nn.log_softmax])),
        fit(module=ENDING_IN["softmax"], loss="sparse_categorical_crossentropy"),
        fit(
            y=ONE_HOT,
            module=nn.Sequential([nn.Dense(3), jax.nn.relu]),
            loss=tnt.losses.BinaryCrossentropy(from_logits=True),
        ),
    ):
        assert np.isfinite(model.history.history["loss"]).all()


def test_tables_and_columns_of_numbers_are_arrays(use_ranks):
    use_ranks(1)
    expected = fit(X, Y).history.history
    assert fit(pd.DataFrame(X), pd.Series(Y, dtype="Int64")).history.history == expected
    expected = fit(np.float32(X > 0), Y).history.history
    assert fit(pd.DataFrame(X > 0), pd.Series(Y).astype("category")).history.history == expected


def test_a_model_of_any_length_takes_inputs_of_other_shapes(use_ranks):
    use_ranks(2)
    pooled = nn.Sequential([lambda x: x[:, :, None].mean(1), nn.Dense(3)])
    model = fit(module=pooled, fit={"validation_data": (X[:, :4], Y)})
    assert np.isfinite(model.history.history["val_loss"]).all()
    assert model.predict(X[:, :3], verbose=0).shape == (len(X), 3)


def test_an_axis_of_another_name_is_told_with_the_one_that_exists(use_ranks):
    use_ranks(2)
    with pytest.raises(ValueError, match=r"unbound axis name: batch.*axis_name='data'"):
        fit(module=OverAnotherAxis())
