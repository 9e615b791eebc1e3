"""Finds the `Metric` for a user's argument.

Metrics with a state of their own, like Keras's, become sums if their updates add up. That is tested
on random rows: whole and in two parts, from two states, and with weights of 0.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat import configuration, keras_objects, losses
from tnt_jax.keras_compat.keras_objects import require_jax_backend
from tnt_jax.keras_compat.losses.base import (
    Loss,
    LossFunctionWrapper,
    at_least_float32,
    kind_of_labels,
)
from tnt_jax.keras_compat.metrics import means
from tnt_jax.keras_compat.metrics.base import Metric
from tnt_jax.keras_compat.metrics.means import MeanMetricWrapper
from tnt_jax.log import logger

_PROBE_ROWS = 6
Shape = tuple[int, ...]


def keeps_own_state(metric: Metric) -> bool:
    """Returns whether a metric is like Keras's, and overrides `update_state` or `result` alone."""
    for stateful, sums in (("update_state", "increments"), ("result", "compute")):
        defined = (vars(base) for base in type(metric).__mro__)
        if sums not in next(names for names in defined if stateful in names or sums in names):
            return True
    return False


class StatefulMetric(Metric):
    """A metric with `stateless_update_state` and `stateless_result` whose updates add up."""

    def __init__(self, metric: Any, y_true_shape: Shape, y_pred_shape: Shape) -> None:
        super().__init__(name=metric.name)
        if not y_pred_shape:
            raise ValueError(
                f"The metric {metric.name!r} needs the shapes of targets and outputs: pass them to "
                "metrics.get."
            )
        self.stateful = metric
        y_true, y_pred = _random_rows(y_true_shape, y_pred_shape)
        try:
            self._probe(y_true, y_pred)
        except TypeError:
            try:
                # As indices, for instance, floats are no targets.
                self._probe(y_true.astype(np.int32), y_pred)
            except TypeError as error:
                raise ValueError(
                    self._refusal(
                        "its update_state failed on random rows with sample_weight or without: "
                        f"{error}"
                    )
                ) from error

    def increments(
        self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None
    ) -> list[jax.Array]:
        """Returns the contribution of an update to the variables of the metric."""
        return self._added(self._initial, y_true, y_pred, weight)

    def compute(self, sums: list[jax.Array]) -> jax.Array:
        """Returns the result of the metric."""
        return self.stateful.stateless_result(self._state(sums))

    def _state(self, sums: list[jax.Array]) -> list[jax.Array]:
        return [jnp.asarray(x + added) for x, added in zip(self._initial, sums, strict=True)]

    def _added(
        self, state: list[Any], y_true: Any, y_pred: Any, weight: ArrayLike | None
    ) -> list[jax.Array]:
        state = [jnp.asarray(value) for value in state]
        y_pred = jax.tree.map(at_least_float32, y_pred)
        if weight is not None and jnp.issubdtype(self.stateful.dtype, jnp.integer):
            weight = jnp.asarray(weight).astype(self.stateful.dtype)
        weights = {} if weight is None else {"sample_weight": weight}
        updated = self.stateful.stateless_update_state(state, y_true, y_pred, **weights)
        return [new - old for new, old in zip(updated, state, strict=True)]

    def _probe(self, y_true: np.ndarray, y_pred: np.ndarray) -> None:
        """Creates the state; raises a ValueError unless the updates of these rows add up."""
        metric = self.stateful
        metric.update_state(y_true, y_pred)  # Some create their variables at the first update.
        metric.reset_state()
        self._initial = [np.asarray(variable.value) for variable in metric.variables]
        half = np.arange(_PROBE_ROWS) < _PROBE_ROWS // 2
        whole = self.increments(y_true, y_pred)
        first, second = (self.increments(y_true[part], y_pred[part]) for part in (half, ~half))
        later = self._added(self._state(first), y_true, y_pred, None)
        masked = self.increments(y_true, y_pred, half.astype(np.float32))
        summed = [a + b for a, b in zip(first, second, strict=True)]
        claims = {
            "updates of two parts do not add up to the update of the whole": (whole, summed),
            "an update depends on what the state holds": (whole, later),
            "rows of sample_weight 0 change the state": (first, masked),
        }
        for problem, (left, right) in claims.items():
            pairs = zip(left, right, strict=True)
            if not all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs):
                raise ValueError(self._refusal(problem))

    def _refusal(self, problem: str) -> str:
        kind = "metric" if isinstance(self.stateful, Metric) else "Keras metric"
        return (
            f"The {kind} {self.name!r} cannot be computed from parts of the data: {problem}. Use a "
            "tnt_jax.metrics class, or compute it from the result of predict."
        )


class KerasMetric(StatefulMetric):
    """A `keras.metrics.Metric` whose updates were found to add up."""

    def compute(self, sums: list[jax.Array]) -> jax.Array:
        """Returns the result of the Keras metric."""
        keras = require_jax_backend()
        values = zip(self.stateful.variables, self._state(sums), strict=True)
        with keras.StatelessScope(state_mapping=list(values)):
            # Converted inside the scope: a result may be one of the variables, which has another
            # value outside.
            return keras.ops.convert_to_tensor(self.stateful.result())


def from_keras(metric: Any, y_true_shape: Shape, y_pred_shape: Shape) -> Metric:
    """Returns a Keras metric as a tnt_jax metric."""
    keras = require_jax_backend()
    is_mean = type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
    if is_mean and type(metric).result is keras.metrics.Mean.result:
        # The mean of a function of rows is known to add up, and tnt_jax's metric handles padding.
        mean = MeanMetricWrapper(metric._fn, metric.name, metric.dtype, **metric._fn_kwargs)
        mean.keeps_sums = _keeps_state(metric)
        return mean
    if type(metric) is keras.metrics.R2Score:
        from tnt_jax.keras_compat.metrics.regression import R2Score

        # Keras counts padding as samples.
        return R2Score(metric.class_aggregation, metric.num_regressors, metric.name, metric.dtype)
    return KerasMetric(metric, y_true_shape, y_pred_shape)


def _keeps_state(metric: Any) -> bool:
    """Returns whether `reset_state` of a Keras metric leaves its state as it is."""
    for variable in metric.variables:
        variable.assign(jnp.ones_like(variable.value))
    metric.reset_state()
    is_kept = all(np.all(variable.value) for variable in metric.variables)
    for variable in metric.variables:
        variable.assign(jnp.zeros_like(variable.value))
    return is_kept


def _random_rows(y_true_shape: Shape, y_pred_shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Returns targets 0 and 1, and outputs in (0, 1), for metrics of classes or of numbers."""
    rng = np.random.default_rng(0)
    y_true = rng.integers(0, 2, size=(_PROBE_ROWS, *y_true_shape[1:])).astype(np.float32)
    return y_true, rng.random((_PROBE_ROWS, *y_pred_shape[1:])).astype(np.float32)


# Names that stand for several classes, which the shapes choose among.
_FAMILIES = {
    "acc": "Accuracy",
    "accuracy": "Accuracy",
    "ce": "Crossentropy",
    "crossentropy": "Crossentropy",
}
_BY_SHAPE = {"binary": "Binary", "class_index": "SparseCategorical", "distribution": "Categorical"}


def _classes() -> dict[str, Callable[..., Metric]]:
    # Their files are imported when a name asks for one of them.
    from tnt_jax.keras_compat.metrics import confusion, iou, regression

    found = keras_objects.classes_of((means, regression, confusion, iou), Metric)
    return {n: cls for n, cls in found.items() if n not in ("MeanMetricWrapper", "ThresholdCounts")}


@overload
def get(identifier: None) -> None: ...
@overload
def get(
    identifier: Any,
    y_true_shape: tuple[int, ...] = (),
    y_pred_shape: tuple[int, ...] = (),
    *,
    loss: Loss | None = None,
) -> Metric: ...
def get(
    identifier: Any,
    y_true_shape: tuple[int, ...] = (),
    y_pred_shape: tuple[int, ...] = (),
    *,
    loss: Loss | None = None,
) -> Metric | None:
    """Returns the metric that `identifier` stands for.

    Args:
        identifier: A name as in Keras (`"mse"`, `"AUC"`, `"binary_accuracy"`); `"accuracy"` or
            `"acc"`, `"crossentropy"` or `"ce"`, chosen by the shapes as Keras does: binary for one
            output, sparse for labels without a class dimension, else categorical; a `Metric` or a
            subclass of it; a real `keras.metrics.Metric` whose updates add up; a configuration as
            `serialize` writes it; a `Loss`; or a callable `f(y_true, y_pred) -> values [batch,
            ...]`; None gives None. Names that only Keras has need Keras on its JAX backend.
        y_true_shape: Shape of the targets; needed for the names that depend on it.
        y_pred_shape: Shape of the outputs of the model; needed for the same names.
        loss: The loss trained with: `"crossentropy"` takes logits if it does.

    Returns:
        A metric, named after the string or the function.

    Raises:
        ValueError: If the name is unknown (the error lists the known ones), or it needs shapes that
            are missing.
    """
    if identifier is None:
        return None
    shapes = tuple(y_true_shape), tuple(y_pred_shape)
    if isinstance(identifier, Metric):
        return StatefulMetric(identifier, *shapes) if keeps_own_state(identifier) else identifier
    if isinstance(identifier, Mapping):
        return get(deserialize(identifier), *shapes, loss=loss)
    if isinstance(identifier, str):
        metric = _by_name(identifier, *shapes, loss)
        metric.name = identifier
        return metric
    if inspect.isclass(identifier):
        return get(identifier(), *shapes)
    if keras_objects.is_keras(identifier, "metrics.Metric"):
        return from_keras(identifier, *shapes)
    if isinstance(identifier, Loss) or callable(identifier):
        as_loss = losses.get(identifier)
        return MeanMetricWrapper(identifier if type(as_loss) is LossFunctionWrapper else as_loss)
    raise ValueError(
        "A metric must be a name, a Metric, a keras.metrics.Metric or a callable f(y_true, "
        f"y_pred), got {identifier!r}."
    )


def serialize(metric: Any) -> dict[str, Any]:
    """Returns the configuration of a metric or of a function, as `keras.metrics.serialize` does."""
    return configuration.serialize(metric)


def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Returns the metric or function that `serialize`, or Keras's own, wrote, or that has a name.

    Names are also those of the user's `custom_objects`; an unknown one raises a ValueError.
    """
    return configuration.deserialize(config, "metrics", custom_objects)


def check_outputs(metric: Metric, outputs: Any) -> None:
    """Raises a ValueError if a metric of probabilities gets others; see `losses.check_outputs`.

    Outputs are those of the model for the first batch [batch, ...].
    """
    loss = getattr(metric, "loss", None)
    if loss is not None:
        losses.check_outputs(loss, outputs)
    if np.size(outputs) == 0 or (np.nanmin(outputs) >= 0 and np.nanmax(outputs) <= 1):
        return
    span = f"they range from {np.nanmin(outputs):.4g} to {np.nanmax(outputs):.4g}"
    if loss is None and getattr(metric, "expects_probabilities", False):
        name = f"tnt_jax.metrics.{type(metric).__name__}"
        raise ValueError(
            f"Metric {metric.name!r} expects probabilities, but the outputs of the model are not: "
            f"{span}. If they are logits, pass {name}(from_logits=True)."
        )
    if getattr(metric, "threshold", None) == 0.5:
        argument = "threshold" if isinstance(metric, means.BinaryAccuracy) else "thresholds"
        logger.warning(
            "Metric %r compares outputs with the threshold 0.5, but %s: these look like logits. "
            "Pass tnt_jax.metrics.%s, which counts a positive logit as class 1.",
            metric.name,
            span,
            f"{type(metric).__name__}({argument}=0.0)",
        )


def _by_name(name: str, y_true_shape: Shape, y_pred_shape: Shape, loss: Loss | None) -> Metric:
    family = _FAMILIES.get(name.lower())
    if family is None:
        cls = keras_objects.find(name, _classes())
        return _only_in_keras(name, y_true_shape, y_pred_shape) if cls is None else cls()
    if not y_pred_shape:
        raise ValueError(
            f"The metric {name!r} depends on the shapes of targets and outputs: pass them, or use "
            "its full name."
        )
    cls = getattr(means, _BY_SHAPE[kind_of_labels(y_true_shape, y_pred_shape)] + family)
    takes_logits = getattr(loss, "fn_kwargs", {}).get("from_logits", False)
    return cls(from_logits=True) if family == "Crossentropy" and takes_logits else cls()


def _only_in_keras(name: str, y_true_shape: Shape, y_pred_shape: Shape) -> Metric:
    cls = keras_objects.find_class(name, "metrics")
    if cls is None:
        names = map(keras_objects.snake_case, _classes())
        listed = [*names, *keras_objects.ALIASES, "accuracy", "acc", "crossentropy"]
        raise keras_objects.unknown(name, listed, kind="metric", advice=keras_objects.advice())
    return from_keras(cls(), y_true_shape, y_pred_shape)
