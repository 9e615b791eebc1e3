"""The base class of metrics: sums that add up over rows, ranks and steps, and their result.

```python
sums = metric.increments(y_true, y_pred, weight)  # pure, on part of a batch, inside a compiled step
value = metric.compute(sums_of_all_parts)          # once
```

`update_state`, `result` and `reset_state` do the same with a state of variables, as in Keras. A
subclass may implement those two instead, with variables from `add_variable`, as in Keras; training
accepts it only if its updates add up (`metrics.stateful`).
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from tnt_jax import _jax
from tnt_jax.keras_compat.configuration import Recorded, config_of
from tnt_jax.keras_compat.keras_objects import snake_case
from tnt_jax.keras_compat.losses import (  # noqa: F401 (public names of `metrics`)
    binary_crossentropy,
    binary_focal_crossentropy,
    categorical_crossentropy,
    categorical_focal_crossentropy,
    categorical_hinge,
    hinge,
    huber,
    kl_divergence,
    log_cosh,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    mean_squared_logarithmic_error,
    poisson,
    sparse_categorical_crossentropy,
    squared_hinge,
)
from tnt_jax.keras_compat.losses.base import compute_dtype
from tnt_jax.train.loops.context import current_step, weight_of_real_rows


def _operator(function: Callable[[Any, Any], Any]) -> Callable[["Variable", Any], jax.Array]:
    return lambda variable, other: function(variable.value, jnp.asarray(other))


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[["Variable", Any], jax.Array]:
    return lambda variable, other: function(jnp.asarray(other), variable.value)


Sums = dict[str, jax.Array]  # Of rows, by name.


class Variable:
    """An array that can be replaced by another of its shape; arithmetic on it returns arrays."""

    def __init__(self, value: Any, *, name: str | None = None, dtype: Any = None) -> None:
        # A NumPy array remains one until it is read: creating a metric must not open a device.
        is_host = isinstance(value, np.ndarray)
        self._value = value.astype(jnp.dtype(dtype)) if is_host else jnp.asarray(value, dtype)
        self.name = name

    @property
    def value(self) -> jax.Array:
        """The array; inside a traced function it may be a tracer."""
        return jnp.asarray(_jax.local_copy(self._value))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._value.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array."""
        return self._value.ndim

    @property
    def dtype(self) -> str:
        """Name of the dtype of the array."""
        return self._value.dtype.name

    def assign(self, value: Any) -> jax.Array:
        """Replaces the array by one that broadcasts to its shape, and returns it."""
        if isinstance(value, Tracer) and current_step() is not None:
            raise TypeError(
                f"Variable {self.name!r} of a metric was assigned inside a distributed step. A "
                f"metric that is updated there must implement increments(y_true, y_pred, weight) "
                f"and compute(sums), which add up over ranks; result() and reset_state() belong "
                f"outside."
            )
        value = jnp.asarray(value).astype(self._value.dtype)
        if value.shape != self.shape and value.ndim:
            raise ValueError(
                f"Variable {self.name!r} has the shape {self.shape}: it cannot be assigned an "
                f"array of {value.shape}."
            )
        self._value = jnp.broadcast_to(value, self.shape)
        return self._value

    @property
    def stored(self) -> Any:
        """The array as it is stored, which may be a NumPy array."""
        return self._value

    def replace(self, value: Any) -> None:
        """Stores an array of the same shape and dtype as it is."""
        self._value = value

    @contextmanager
    def holding(self, value: Any) -> Iterator[None]:
        """Gives the variable another value temporarily."""
        before, self._value = self._value, jnp.asarray(value)
        try:
            yield
        finally:
            self._value = before

    def assign_add(self, value: Any) -> jax.Array:
        """Adds to the array and returns the sum."""
        return self.assign(self.value + jnp.asarray(value))

    def assign_sub(self, value: Any) -> jax.Array:
        """Subtracts from the array and returns the difference."""
        return self.assign(self.value - jnp.asarray(value))

    def numpy(self) -> np.ndarray:
        """Returns the array on the host."""
        return np.asarray(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __repr__(self) -> str:
        kind = f"name={self.name}, shape={self.shape}, dtype={self.dtype}"
        return f"<Variable {kind}, value={self.value}>"

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __neg__(self) -> jax.Array:
        return -self.value

    __add__, __radd__ = _operator(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _operator(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv), _reflected(operator.truediv)
    __pow__ = _operator(operator.pow)
    __lt__, __le__ = _operator(operator.lt), _operator(operator.le)
    __gt__, __ge__ = _operator(operator.gt), _operator(operator.ge)


class Metric(Recorded):
    """Base class of metrics.

    Subclasses implement `increments` and `compute`. Increments are plain sums over rows: those of a
    batch are the sum of those of its parts, so the result does not depend on the number of ranks.

    Args:
        dtype: Dtype of values and results, by default float32, which keeps float64. Sums are at
            least float32, or integers.
        name: Name of the metric in logs.

    Attributes:
        name: Name of the metric in logs.
        keeps_sums: Whether the sums of an epoch go on in the next one.
    """

    keeps_sums = False

    def __init__(self, dtype: Any = None, name: str | None = None) -> None:
        self.name = name or snake_case(type(self).__name__)
        self._dtype = compute_dtype(dtype)
        self._variables: list[Variable] = []
        self._sums: Any = None

    @property
    def dtype(self) -> str:
        """Name of the dtype of values and results."""
        return self._dtype

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Any:
        """Returns the contribution of these rows to the sums, a pytree of one form for any number.

        Targets and outputs are [rows, ...], weights [rows] or one per value. A row with weight 0
        adds nothing, whatever its contents.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement increments(y_true, y_pred, weight) -> sums."
        )

    def compute(self, sums: Any) -> jax.Array:
        """Returns the metric from the sums of all rows."""
        raise NotImplementedError(f"{type(self).__name__} must implement compute(sums) -> scalar.")

    def update_state(
        self, y_true: Any, y_pred: Any, sample_weight: ArrayLike | None = None
    ) -> None:
        """Adds rows to the state; inside a distributed step, the real rows of all ranks.

        Targets and outputs are [rows, ...], weights a scalar, [rows], or one per value.
        """
        self._add(self.increments(y_true, y_pred, weight_of_real_rows(sample_weight)))

    def result(self) -> jax.Array:
        """Returns the metric of all rows since `reset_state`; 0 if there were none.

        Inside a distributed step, which adds to the state when it has run, it is a RuntimeError.
        """
        self._require_outside("result")
        if self._sums is None:
            return jnp.zeros((), self.dtype)
        return self.compute(jax.tree.map(lambda variable: variable.value, self._sums))

    def reset_state(self) -> None:
        """Clears the state; a RuntimeError inside a distributed step."""
        self._require_outside("reset_state")
        for variable in self.variables:
            variable.assign(0)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Adds rows to the state and returns the result."""
        self.update_state(*args, **kwargs)
        return self.result()

    @property
    def variables(self) -> list[Variable]:
        """The variables of the state, including those of metrics and variables in attributes."""
        others = [value for name, value in vars(self).items() if name != "given_arguments"]
        held = [self._made_variables(), others]
        found: dict[int, Variable] = {}
        for leaf in jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, (Variable, Metric))):
            if isinstance(leaf, Variable):
                found[id(leaf)] = leaf
            elif isinstance(leaf, Metric):
                found |= {id(variable): variable for variable in leaf.variables}
        return list(found.values())

    def add_variable(
        self,
        shape: Sequence[int],
        initializer: Any,
        dtype: Any = None,
        aggregation: str = "sum",
        name: str | None = None,
    ) -> Variable:
        """Creates a variable of the state.

        Args:
            shape: Shape of the variable.
            initializer: `"zeros"`, `"ones"`, an array, or a callable `(shape, dtype) -> array`.
            dtype: Dtype of the variable, float32 by default.
            aggregation: How values of several ranks are combined; must be `"sum"`.
            name: Name of the variable.

        Raises:
            ValueError: If the values of ranks are not to be summed, or the initializer is unknown.
        """
        if aggregation != "sum":
            raise ValueError(
                "The state of a metric is summed over ranks: aggregation must be 'sum', got "
                f"{aggregation!r}."
            )
        dtype = compute_dtype(dtype)
        value = _initial(initializer, tuple(shape), jnp.dtype(dtype))
        variable = Variable(value, name=name, dtype=dtype)
        self._made_variables().append(variable)
        return variable

    def add_weight(
        self,
        shape: Sequence[int] = (),
        initializer: Any = None,
        dtype: Any = None,
        name: str | None = None,
    ) -> Variable:
        """Creates a variable of the state, by default zeros; see `add_variable`."""
        return self.add_variable(shape, initializer, dtype, name=name)

    def stateless_update_state(
        self, metric_variables: Sequence[Any], *args: Any, **kwargs: Any
    ) -> list[jax.Array]:
        """Returns the variables that `update_state` makes of the given ones; changes no state."""
        with self._holding(metric_variables):
            self.update_state(*args, **kwargs)
            return [variable.value for variable in self.variables]

    def stateless_result(self, metric_variables: Sequence[Any]) -> Any:
        """Returns the result for given values of the variables."""
        with self._holding(metric_variables):
            result = self.result()
            return jax.tree.map(
                jnp.asarray, result, is_leaf=lambda leaf: isinstance(leaf, Variable)
            )

    def stateless_reset_state(self) -> list[jax.Array]:
        """Returns the values of the variables after `reset_state`; changes no state."""
        with self._holding(self.variables):
            self.reset_state()
            return [variable.value for variable in self.variables]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal metric."""
        return config_of(self, "name", "dtype")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}>"

    def _declare(self, shapes: Mapping[str, Sequence[int]], dtype: Any = None) -> None:
        """Creates the sums that `increments` returns by name, as attributes with these names."""
        self._sums = {}
        for name, shape in shapes.items():
            self._sums[name] = self.add_variable(shape, "zeros", dtype, name=name)
            setattr(self, name, self._sums[name])

    def sums(self, like: Any) -> Any:
        """Returns the arrays of the state for a distributed step; at first zeros like `like`."""
        if self._sums is None:
            self._add(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like))
        return jax.tree.map(lambda variable: variable.stored, self._sums)

    def replace_sums(self, sums: Any) -> None:
        """Replaces the arrays of its state by those that a distributed step returned."""
        jax.tree.map(lambda variable, value: variable.replace(value), self._sums, sums)

    def show_sums(self, sums: Any) -> None:
        """Lets `result` be that of sums which are counted elsewhere, of an epoch for instance."""
        self.sums(sums)
        self.replace_sums(jax.tree.map(np.asarray, sums))

    def _require_outside(self, method: str) -> None:
        if (step := current_step()) is not None:
            raise RuntimeError(
                f"{self.name}.{method}() was called inside the distributed step {step.name}, which "
                f"adds to the metric's state when it has run. Call it after the step."
            )

    def _add(self, added: Any) -> None:
        if (step := current_step()) is not None:
            step.record(self, added)
            return
        if self._sums is None and isinstance(added, dict):
            self._declare({name: jnp.shape(value) for name, value in added.items()})
        elif self._sums is None:
            self._sums = jax.tree.map(
                lambda value: self.add_variable(jnp.shape(value), "zeros", value.dtype), added
            )
        jax.tree.map(lambda variable, value: variable.assign_add(value), self._sums, added)

    def _made_variables(self) -> list[Variable]:
        if "_variables" not in vars(self):
            raise RuntimeError(
                f"{type(self).__name__}.__init__ must call super().__init__() before anything else."
            )
        return self._variables

    @contextmanager
    def _holding(self, values: Sequence[Any]) -> Iterator[None]:
        variables = self.variables
        if len(values) != len(variables):
            raise ValueError(
                f"{self.name!r} has {len(variables)} variables, got {len(values)} values for them."
            )
        with ExitStack() as stack:
            for variable, value in zip(variables, values, strict=True):
                stack.enter_context(variable.holding(value))
            yield


def _initial(initializer: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if initializer is None or isinstance(initializer, str):
        known = {None: np.zeros, "zeros": np.zeros, "ones": np.ones}
        if initializer not in known:
            raise ValueError(
                f"initializer must be 'zeros', 'ones', an array or a callable, got {initializer!r}."
            )
        return known[initializer](shape, dtype)
    if callable(initializer):
        return initializer(shape, dtype=dtype)
    return jnp.broadcast_to(jnp.asarray(initializer), shape)
