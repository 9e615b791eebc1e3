"""What every adapter offers to the step, and how a module of any library is called."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

# Names by which modules take their mode, and the value that each has in training.
_TRAIN_FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}


class Variables(NamedTuple):
    """Arrays of a model: those that are trained and those that the model changes itself."""

    params: Any
    model_state: Any


class Applied(NamedTuple):
    """What a forward pass returns.

    Attributes:
        outputs: Pytree of arrays `[rows, ...]`.
        model_state: Model state after the pass.
        penalty: Sum of the losses that the model adds itself, such as weight regularisation: a scalar. Its mean over ranks counts,
            so that what depends on the rows must be a mean over them.
        increments: What these rows add to the sums of metrics that the model holds itself: pytree of arrays.
    """

    outputs: Any
    model_state: Any
    penalty: jax.Array | float
    increments: Any = ()


class Adapter(Protocol):
    """A model as pure functions; the step calls `apply` inside `shard_map` over the axis `data`.

    Attributes:
        name: Name of the model in tables.
        holds_variables: Whether the user's object holds variables, so that `write_back` has something to do.
    """

    name: str
    holds_variables: bool

    def sample_inputs(self) -> Any:
        """Returns inputs that the model can be built with, for a model that tells them itself; None for another."""
        ...

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns fresh variables for inputs like `inputs`, a pytree of arrays `[rows, ...]`."""
        ...

    def attach(self, inputs: Any) -> None:
        """Prepares to compute with variables of another model, for inputs like `inputs`; takes the place of `init`."""
        ...

    def apply(
        self, params: Any, model_state: Any, inputs: Any, *, key: jax.Array | None, train: bool, mask: jax.Array | None
    ) -> Applied:
        """Returns the forward pass over this rank's rows.

        Args:
            params: Trained arrays.
            model_state: Arrays that the model changes itself.
            inputs: Pytree of arrays `[rows, ...]`.
            key: This rank's key for this step; None outside training.
            train: Whether dropout and batch statistics are on.
            mask: float32 `[rows]`, 0 for padded rows that must not enter batch statistics; None when there are none.
        """
        ...

    def held_metrics(self) -> dict[str, Any]:
        """Returns the metrics that the model holds itself, as objects of its library, by the names of their logs."""
        ...

    def metric_results(self, sums: Any) -> dict[str, float]:
        """Returns the metrics that the model holds itself by name, for sums of `Applied.increments` over rows, ranks and steps."""
        ...

    def export(self, variables: Variables) -> Any:
        """Returns variables in the form that the model's library uses."""
        ...

    def has_changed(self) -> bool:
        """Tells whether the user's object holds other variables than it was last read with, or given by `write_back`."""
        ...

    def write_back(self, variables: Variables) -> None:
        """Stores trained variables in the user's own object, where it holds any."""
        ...


@dataclass(frozen=True)
class CallStyle:
    """How a module wants to be called, read off the signature of its call method.

    Attributes:
        flag: Name of the argument that tells training from inference, or None.
        unpack: Whether a tuple of inputs is passed as several arguments.
        names: Names of the arguments that inputs given as a dict can fill.
    """

    flag: str | None
    unpack: bool
    names: frozenset[str]

    @classmethod
    def of(cls, call: Callable) -> "CallStyle":
        """Returns the style of a bound call method."""
        parameters = inspect.signature(call).parameters.values()
        flag = next((p.name for p in parameters if p.name in _TRAIN_FLAGS), None)
        named = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != flag
        ]
        positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return cls(flag, variadic or len(positional) > 1, frozenset(p.name for p in named))

    def arguments(self, inputs: Any, *, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments for one call.

        A dict whose keys are argument names is passed by name, a tuple or list by position if the module takes several arguments;
        anything else is the one argument.
        """
        flags = {} if self.flag is None else {self.flag: _TRAIN_FLAGS[self.flag] is train}
        if isinstance(inputs, Mapping) and inputs and set(inputs) <= self.names:
            return (), {**inputs, **flags}
        if isinstance(inputs, (tuple, list)) and self.unpack:
            return tuple(inputs), flags
        return (inputs,), flags
