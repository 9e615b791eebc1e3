"""The base class of losses: Keras's reductions, as sums that add up over ranks.

A loss gives one value per row of the batch (`call`). The loss of a batch is the quotient of two
sums over its rows, so a batch can be split exactly: each rank returns its two sums (`terms`), and
the step divides the totals. `check_outputs` and `check_labels` check the first batch on the host:
inside a compiled step nothing can be checked.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat.configuration import Recorded, config_of
from tnt_jax.keras_compat.keras_objects import mask_of_outputs, snake_case
from tnt_jax.train.steps.epoch_sums import match_ranks, weighted, where_rows

EPSILON = 1e-7  # keras.config.epsilon(): keeps logarithms and quotients of probabilities finite.
_SUM_TOLERANCE = 1e-2  # bfloat16 rounds a probability by up to 2**-9 of its size.


def compute_dtype(dtype: Any) -> str:
    """Returns the name of the dtype that Keras computes in for a `dtype=` argument."""
    name = getattr(dtype, "compute_dtype", dtype)
    if isinstance(name, str):
        name = {"int": "int32", "float": "float32"}.get(name, name.removeprefix("mixed_"))
    try:
        return jnp.dtype("float32" if name is None else name).name
    except TypeError as error:
        raise ValueError(
            f"dtype must be a dtype such as 'float32' or 'bfloat16', got {dtype!r}."
        ) from error


def divide_no_nan(total: Any, count: Any) -> Any:
    """Returns total / count, and 0 where count is 0; of float32 host arrays as a host array."""
    if all(isinstance(x, np.ndarray) and x.dtype == np.float32 for x in (total, count)):
        # The same quotient, without programs to compile.
        with np.errstate(all="ignore"):
            return np.divide(total, count, out=np.zeros_like(total + count), where=count != 0)
    is_empty = jnp.equal(count, 0)
    return jnp.where(is_empty, 0, total / jnp.where(is_empty, 1, count))


def of_one_dtype(y_true: Any, y_pred: Any) -> tuple[jax.Array, jax.Array]:
    """Returns targets and outputs as arrays with the dtype of the outputs."""
    y_pred = jnp.asarray(y_pred)
    return jnp.asarray(y_true).astype(y_pred.dtype), y_pred


def at_least_float32(array: Any) -> jax.Array:
    """Returns a floating array; half precision and integers become float32."""
    array = jnp.asarray(array)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def in_dtype(array: Any, dtype: str) -> jax.Array:
    """Returns an array in a dtype; float32 means at least float32, so float64 is kept."""
    return at_least_float32(array) if dtype == "float32" else jnp.asarray(array).astype(dtype)


def standardized(y_true: Any, y_pred: Any, dtype: str = "float32") -> tuple[Any, Any]:
    """Returns arrays, with `y_pred` and floating targets in `dtype`; see `in_dtype`.

    Unlike in Keras, integer targets remain integers, which large labels need. Booleans and integers
    below 32 bits become int32, because arithmetic on them would wrap around.
    """

    def target(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return in_dtype(leaf, dtype)
        if leaf.dtype.itemsize < 4:
            return leaf.astype(jnp.promote_types(leaf.dtype, jnp.int32))
        return leaf

    y_pred = jax.tree.map(lambda x: in_dtype(x, dtype), y_pred, is_leaf=_is_array_as_list)
    return jax.tree.map(target, y_true, is_leaf=_is_array_as_list), y_pred


def _is_array_as_list(value: Any) -> bool:
    """Returns whether lists hold the numbers of one array, rather than several arrays."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(leaf, (bool, int, float, np.generic)) for leaf in jax.tree.leaves(value)
    )


REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight", "mean", "none", None)


class Loss(Recorded):
    """Base class of losses, with the reductions of `keras.losses.Loss`.

    Subclasses implement `call`. Row i of its result must depend only on row i of its arguments, so
    that ranks can work on parts of the batch.

    Attributes:
        name: Name of the loss in logs.
        reduction: `"sum_over_batch_size"` (alias `"mean"`): weighted sum / number of values;
            `"sum"`: weighted sum; `"mean_with_sample_weight"`: weighted sum / sum of the weights;
            `"none"` or `None`: no reduction; such a loss can be called, but not used in training.
        dtype: Name of the dtype in which the values are computed; `float32`, the default, keeps
            float64. Sums are at least float32.
        expects_probabilities: Whether `y_pred` must hold probabilities rather than logits.
        targets: The kind of `y_true`: `"class_index"`, `"distribution"` over the classes,
            `"binary"`, `"sign"` (-1 and 1, or 0 and 1), `"like_outputs"`, `"by_shape"` (one of the
            first three), or `"any"`. `losses.check_labels` reads it.
        axis: Dimension of the classes.
    """

    expects_probabilities: bool = False
    targets: str = "any"
    axis: int = -1

    def __init__(
        self,
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"Invalid value for argument reduction: it must be one of {REDUCTIONS}, got "
                f"{reduction!r}."
            )
        self.name = name or snake_case(type(self).__name__)
        self.reduction = reduction
        self._dtype = compute_dtype(dtype)

    @property
    def dtype(self) -> str:
        """Name of the dtype in which the values are computed."""
        return self._dtype

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of an equal loss, unlike Keras with a `dtype` but float32."""
        config = config_of(self, "name", "reduction", "dtype")
        return {
            name: value for name, value in config.items() if (name, value) != ("dtype", "float32")
        }

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns the loss [batch, ...] of every row, for targets and outputs [batch, ...]."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement call(y_true, y_pred) -> values [batch, ...]."
        )

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array | None:
        """Returns which values count, as booleans shaped like those of `call`; None for all."""
        return None

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: ArrayLike | None = None
    ) -> jax.Array:
        """Returns the reduced loss of one whole batch, as Keras does.

        Values that a Keras mask on `y_pred` excludes do not count. `sample_weight` is a scalar, or
        weights [batch], [batch, 1] or shaped like the values. If `reduction` is None or, as in
        Keras, if there are no values, the result is the weighted values [batch, ...].
        """
        given = mask_of_outputs(y_pred)
        y_true, y_pred = standardized(y_true, y_pred, self.dtype)
        values = in_dtype(self.call(y_true, y_pred), self.dtype)
        valid = self._valid(values, y_true, y_pred, given)
        values, weight = weighted(values, sample_weight, valid, None)
        values = values if weight is None else values * weight
        if self.reduction in ("none", None) or values.shape in ((), (0,)):
            return values
        total, count = self._sums(values, weight, sample_weight, valid, None)
        return (total if count is None else divide_no_nan(total, count)).astype(values.dtype)

    def terms(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        valid: ArrayLike | None = None,
    ) -> tuple[jax.Array, jax.Array | float | None]:
        """Returns the sums whose quotient is the loss; both add up over the parts of a batch.

        The loss of a batch split into parts is `divide_no_nan(sum of totals, sum of counts)`, or
        the sum of the totals if count is None.

        Args:
            y_true: Targets [rows, ...].
            y_pred: Outputs of the model [rows, ...].
            sample_weight: Weights [rows], [rows, 1] or shaped like the values. Weights [rows] of
                values [rows, T] weight whole rows; Keras would treat them as weights [T].
            mask: 1 for real rows and 0 for padding [rows]. The contents of a padded row, including
                NaN, affect neither the sums nor the gradients with respect to `y_pred`.
            valid: A further restriction of the values that count, as booleans shaped like the
                result of `call`: the mask that a Keras model attaches to its outputs, such as that
                of padded tokens.

        Returns:
            The weighted sum of the values, and the divisor of the reduction (None for `"sum"`).

        Raises:
            ValueError: If the loss has no reduction, its values are not [rows, ...], or `valid` has
                another shape.
        """
        if self.reduction in ("none", None):
            raise ValueError(
                f"Loss {self.name!r} has reduction=None; training needs one of {REDUCTIONS[:3]}."
            )
        y_true, y_pred = standardized(y_true, y_pred, self.dtype)
        if mask is not None:
            # Selecting before the loss as well as after it keeps 0 * inf out of the gradient.
            y_pred = jax.tree.map(lambda leaf: where_rows(mask, leaf, 0.5), y_pred)
        values = in_dtype(self.call(y_true, y_pred), self.dtype)
        self._require_rows(values, y_pred)
        valid = self._valid(values, y_true, y_pred, valid)
        values, weight = weighted(values, sample_weight, valid, mask)
        if mask is not None:
            values = where_rows(mask, values, 0)
        values = values if weight is None else values * weight
        return self._sums(values, weight, sample_weight, valid, mask)

    def _sums(
        self,
        values: jax.Array,
        weight: jax.Array | None,
        sample_weight: Any,
        valid: jax.Array | None,
        mask: Any,
    ) -> tuple[jax.Array, jax.Array | float | None]:
        # Half precision is too coarse for sums.
        total = jnp.sum(values, dtype=jnp.promote_types(values.dtype, jnp.float32))
        if self.reduction == "sum":
            return total, None
        if self.reduction == "mean_with_sample_weight" and sample_weight is not None:
            assert weight is not None
            return total, jnp.sum(weight, dtype=jnp.promote_types(weight.dtype, jnp.float32))
        if valid is None and mask is None:
            # Known at trace time: its sum over ranks is a multiplication.
            return total, float(values.size)
        if valid is None:
            counted = jnp.ones(values.shape, jnp.float32)
        else:
            counted = valid.reshape(values.shape).astype(jnp.float32)
        return total, jnp.sum(counted if mask is None else where_rows(mask, counted, 0))

    def _valid(
        self, values: jax.Array, y_true: Any, y_pred: Any, given: ArrayLike | None
    ) -> jax.Array | None:
        own = self.valid(y_true, y_pred)
        if given is None:
            return own
        given = jnp.asarray(given) != 0
        if given.size != values.size or given.shape[:1] != values.shape[:1]:
            raise ValueError(
                f"The mask of the outputs has the shape {given.shape}, but the loss {self.name!r} "
                f"has values of shape {values.shape}. Let the loss keep the masked dimensions, or "
                "end the mask in the model, for instance with a pooling layer."
            )
        given = given.reshape(values.shape)
        return given if own is None else given & (own.reshape(values.shape) != 0)

    def _require_rows(self, values: jax.Array, y_pred: Any) -> None:
        shape = jax.tree.leaves(y_pred)[0].shape
        if values.ndim == 0 or values.shape[:1] != shape[:1]:
            raise ValueError(
                f"Loss {self.name!r} returned values of shape {values.shape} for outputs of shape "
                f"{shape}. Training on parts of a batch needs one value per row: return [batch, "
                "...] and leave the reduction over the batch to the loss."
            )


class LossFunctionWrapper(Loss):
    """A loss made from a function `fn(y_true, y_pred, **fn_kwargs) -> values [batch, ...]`.

    As in Keras, a last dimension of size one is added to or removed from `y_true` or `y_pred` when
    that makes their ranks equal. Unlike in Keras, integer targets remain integers.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: Any = None,
        **fn_kwargs: Any,
    ) -> None:
        super().__init__(name or getattr(fn, "__name__", None), reduction, dtype)
        self.fn = fn
        self.fn_kwargs = fn_kwargs

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns `fn(y_true, y_pred)` [batch, ...]."""
        trues, structure = jax.tree.flatten(y_true)
        if structure == jax.tree.structure(y_pred):
            pairs = list(map(match_ranks, trues, jax.tree.leaves(y_pred)))
            y_true, y_pred = (structure.unflatten([p[side] for p in pairs]) for side in (0, 1))
        return jnp.asarray(self.fn(y_true, y_pred, **self.fn_kwargs))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}({self.fn}, kwargs={self.fn_kwargs})>"


def kind_of_labels(y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...]) -> str:
    """Returns `"binary"` (one output), `"class_index"` (no class dimension) or `"distribution"`."""
    if y_pred_shape[-1] == 1:
        return "binary"
    has_no_classes = len(y_true_shape) < len(y_pred_shape) or y_true_shape[-1] == 1
    return "class_index" if has_no_classes else "distribution"


def check_outputs(loss: Loss, outputs: Any) -> None:
    """Raises a ValueError, with the remedies, if a loss of probabilities gets others.

    Outputs are the model's for the first batch [batch, ...]. NaN does not indicate logits; it is
    left to callbacks that check for NaN.
    """
    if not loss.expects_probabilities:
        return
    outputs = np.asarray(outputs, np.float64)
    has_one_output = loss.targets == "by_shape" and outputs.shape[-1] == 1
    is_independent = loss.targets == "binary" or has_one_output
    problem = _range_problem(outputs)
    if not problem and not is_independent:
        problem = _sum_problem(outputs, loss.axis)
    if problem:
        layer = "sigmoid" if is_independent else "softmax"
        raise ValueError(
            f"Loss {loss.name!r} expects probabilities, but the outputs of the model are not: "
            f"{problem}. If they are logits, use a loss that takes logits, "
            f"{_logits_loss(loss, is_independent)}; or end the model with jax.nn.{layer}."
        )


def check_labels(loss: Loss, y_true: Any, y_pred_shape: tuple[int, ...]) -> None:
    """Raises a ValueError if the targets have not the kind, range and shape that a loss takes.

    They are those of the first batch [batch, ...]; the error names the row and the value.
    """
    targets = np.asarray(y_true)
    shape = tuple(y_pred_shape)
    kind = kind_of_labels(targets.shape, shape) if loss.targets == "by_shape" else loss.targets
    if targets.shape[:1] != shape[:1]:
        raise ValueError(
            f"Loss {loss.name!r} needs as many targets as outputs, got shapes {targets.shape} and "
            f"{shape}."
        )
    if kind == "class_index":
        _check_class_index(loss, targets, shape)
    elif kind != "any":
        _check_same_shape(loss, kind, targets, shape)
    if kind == "binary":
        is_share = (targets >= 0) & (targets <= 1) | np.isnan(targets)
        _require(loss, is_share, targets, "targets in [0, 1]")
    if kind == "sign":
        is_sign = (targets == 1) | (targets == (-1 if (targets == -1).any() else 0))
        _require(loss, is_sign, targets, "targets that are -1 and 1, or 0 and 1")


def _range_problem(outputs: np.ndarray) -> str:
    numbers = outputs[~np.isnan(outputs)]
    if numbers.size == 0 or (numbers.min() >= 0 and numbers.max() <= 1 + _SUM_TOLERANCE):
        return ""
    return f"they range from {numbers.min():.4g} to {numbers.max():.4g}"


def _sum_problem(outputs: np.ndarray, axis: int) -> str:
    sums = outputs.sum(axis=axis)
    wrong = np.argwhere(np.abs(sums - 1) > _SUM_TOLERANCE)  # A NaN sum compares false.
    if wrong.size:
        return f"row {wrong[0][0]} sums to {sums[tuple(wrong[0])]:.4g} over the classes"
    return ""


def _logits_loss(loss: Loss, is_independent: bool) -> str:
    if "from_logits" in getattr(loss, "fn_kwargs", {}):
        return f"tnt_jax.losses.{type(loss).__name__}(from_logits=True)"
    kind = "Binary" if is_independent else "Categorical"
    return f"for instance tnt_jax.losses.{kind}Crossentropy(from_logits=True)"


def _check_class_index(loss: Loss, labels: np.ndarray, shape: tuple[int, ...]) -> None:
    expected = tuple(np.delete(shape, loss.axis).tolist())
    given = labels.shape
    if labels.ndim == len(shape) and given[loss.axis] == 1:
        labels = np.squeeze(labels, loss.axis)
    if labels.shape != expected:
        hint = " One-hot targets need 'categorical_crossentropy'." if given == shape else ""
        raise ValueError(
            f"Loss {loss.name!r} needs integer labels of shape {expected} for outputs of shape "
            f"{shape}, got {given}.{hint}"
        )
    size = shape[loss.axis]
    is_label = (labels >= 0) & (labels < size) & (labels == np.round(labels))
    is_label |= labels == getattr(loss, "ignore_class", None)
    _require(loss, is_label, labels, f"integer labels in [0, {size}) for {size} outputs")


def _check_same_shape(loss: Loss, kind: str, targets: np.ndarray, shape: tuple[int, ...]) -> None:
    short, long = sorted((targets.shape, shape), key=len)
    if short != long and (*short, 1) != long:
        is_index = kind == "distribution" and targets.shape in (shape[:-1], (*shape[:-1], 1))
        hint = " Integer labels need 'sparse_categorical_crossentropy'." if is_index else ""
        raise ValueError(
            f"Loss {loss.name!r} needs targets of the outputs' shape {shape}, got "
            f"{targets.shape}.{hint}"
        )


def _require(loss: Loss, is_allowed: np.ndarray, targets: np.ndarray, needed: str) -> None:
    wrong = np.argwhere(~is_allowed)
    if wrong.size:
        first = tuple(wrong[0].tolist())
        where = f"row {first[0]}" + (f" at {first[1:]}" if targets[0].size > 1 else "")
        raise ValueError(
            f"Loss {loss.name!r} needs {needed}; {where} of this batch holds {targets[first]} "
            f"({len(wrong)} such values in all)."
        )
