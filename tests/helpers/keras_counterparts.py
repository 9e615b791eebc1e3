"""Public classes and functions of keras.losses and keras.metrics, and ours of the same names."""

import inspect

import keras

from tnt_jax.keras_compat import losses, metrics

# What differs on purpose, all of it, with the reason.
LEFT_OUT = {
    "losses.get": "returns a Loss for the name of a function as well: training needs its sums; "
    "`fn` of it is the function",
    "losses.Huber, CosineSimilarity, SparseCategoricalCrossentropy": "configurations hold delta and axis, which Keras forgets",
    "losses.Hinge, SquaredHinge": "a 0 always means -1; Keras looks at the whole batch, whose "
    "parts no rank sees",
    "losses.Circle; Dice and Tversky with axis=None": "serve calls on a batch; training refuses "
    "what is no sum over rows",
    "losses.SparseCategoricalCrossentropy": "takes any axis, Keras on JAX the last one only",
    "losses: weights [rows] of values [rows, T]": "weigh whole rows; Keras takes them for "
    "weights [T], which fails unless rows == T",
    "metrics.IoU and kin": "fractions of a weight count by default; Keras truncates weights to "
    "integers",
    "metrics.Mean and kin, with a scalar weight": "weighs each row; Keras counts the whole "
    "update as one row",
    "metrics: dtype of sums": "at least float32, and results are cast; Keras adds up in half "
    "precision",
    "metrics: outputs of half precision": "are widened before the values are computed, as the "
    "losses of both do",
    "metrics.R2Score": "rows of weight 0 are no samples; takes outputs [rows] too",
    "metrics: names by default": "are not numbered per process (`precision`, not `precision_1`); "
    "equal names are numbered in the logs",
    "metrics.AUC.curve, summation_method": "are strings; Keras's enumerations, which it accepts, "
    "are not public",
    "metrics.Metric.add_variable(aggregation=)": "'sum' only: anything else does not add up over "
    "ranks",
    "keras.config.set_floatx": "is not followed; pass dtype=",
    "a metric of ours in keras.Model.compile": "belongs to Keras's trainer, which replaces "
    "keras.Variable objects alone",
}


def public(module, base):
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base)
    }


CLASSES = [("losses", name) for name in public(keras.losses, keras.losses.Loss)]


FUNCTIONS = [
    (room, name)
    for room, module in (("losses", keras.losses), ("metrics", keras.metrics))
    for name, value in vars(module).items()
    if inspect.isfunction(value)
]


OURS = {"losses": losses, "metrics": metrics}


THEIRS = {"losses": keras.losses, "metrics": keras.metrics}


# Arguments of the classes that need some; of the others a few that are not the defaults.
NEEDED = {
    "LossFunctionWrapper": lambda room: {"fn": room.mean_squared_error},
    "MeanMetricWrapper": lambda room: {"fn": room.mean_squared_error},
    "IoU": lambda room: {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotIoU": lambda room: {"num_classes": 3, "target_class_ids": [0, 2]},
    "MeanIoU": lambda room: {"num_classes": 3, "ignore_class": 1},
    "OneHotMeanIoU": lambda room: {"num_classes": 3},
    "SensitivityAtSpecificity": lambda room: {"specificity": 0.4},
    "SpecificityAtSensitivity": lambda room: {"sensitivity": 0.6, "num_thresholds": 20},
    "PrecisionAtRecall": lambda room: {"recall": 0.5},
    "RecallAtPrecision": lambda room: {"precision": 0.6},
    "Huber": lambda room: {"delta": 0.3},
    "AUC": lambda room: {"curve": "PRGAIN", "num_thresholds": 50},
    "FBetaScore": lambda room: {"beta": 2.0, "average": "weighted"},
    "Tversky": lambda room: {"alpha": 0.3, "axis": [1]},
}


def make(room, name, /, **more):
    settings = NEEDED.get(name, lambda _: {})
    return (
        getattr(OURS[room], name)(**settings(OURS[room]), **more),
        getattr(THEIRS[room], name)(**settings(THEIRS[room]), **more),
    )


CONCRETE = [(room, name) for room, name in CLASSES if name not in ("Loss", "Metric")]
