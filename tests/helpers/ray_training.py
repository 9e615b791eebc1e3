"""Training on a Ray dataset, and on the same rows in arrays."""

import flax.linen as nn
import numpy as np

import tnt_jax as tnt

NUM_ROWS, SIZE, EPOCHS = 22, 8, 2
_rng = np.random.default_rng(0)
X = _rng.normal(size=(NUM_ROWS, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]]).astype(np.float32)


def dataset_of(data, x=X, y=Y):
    """Returns the rows in blocks of different sizes and kinds, passed on by tasks."""
    import pandas as pd

    parts = [(x[rows], y[rows]) for rows in (slice(0, 3), slice(3, None))]
    frames = [pd.DataFrame({"x": [*one], "y": [*other]}) for one, other in parts]
    return data.from_pandas(frames).map_batches(lambda batch: batch)


def make_model(seed=0):
    model = tnt.Model(nn.Dense(1), seed=seed)
    model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
    return model


def numbers(model, data, *targets, validation_data, **arguments):
    """Trains, evaluates and predicts; returns all numbers by name."""
    history = model.fit(
        data, *targets, epochs=EPOCHS, verbose=0, validation_data=validation_data, **arguments
    )
    losses = {f"history {name}": values for name, values in history.history.items()}
    weights = {f"weight {n}": np.asarray(w) for n, w in enumerate(model.get_weights())}
    evaluated = model.evaluate(data, *targets, verbose=0, **_without(arguments, "shuffle"))
    predicted = model.predict(data, verbose=0, **_without(arguments, "shuffle"))
    return losses | weights | {"evaluated": evaluated, "predicted": predicted}


def numbers_of_arrays():
    return numbers(make_model(), X, Y, validation_data=(X, Y), batch_size=SIZE, shuffle=False)


def _without(arguments, name):
    return {key: value for key, value in arguments.items() if key != name}
