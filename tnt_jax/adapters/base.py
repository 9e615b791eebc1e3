"""The interface of adapters, and how a module of any library is called."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import jax

# The argument names of train flags, with their values in training.
TRAIN_FLAGS = {
    "train": True,
    "training": True,
    "is_training": True,
    "is_train": True,
    "deterministic": False,
    "inference": False,
    "eval_mode": False,
    "use_running_average": False,
}

# Names of Linen collections and of classes of NNX variables whose values are added to the training
# loss.
LOSSES = ("losses", "loss", "Losses", "Loss")


class CallError(ValueError):
    """A module cannot be called as required; the message alone says what to do."""


class Variables(NamedTuple):
    """Arrays of a model: trained parameters, and state that the model updates itself."""

    params: Any
    model_state: Any


class FreshVariables(NamedTuple):
    """A traced program that makes the variables of a model, and what it is called with."""

    traced: Any
    arguments: Callable[[], tuple[Any, ...]]
    finish: Callable[[Any], Variables]  # From its results, or descriptions of them.


class Applied(NamedTuple):
    """The result of a forward pass.

    Attributes:
        outputs: Pytree of arrays `[rows, ...]`.
        model_state: Model state after the pass.
        penalty: Sum of the losses that the model adds itself, such as weight regularisation: a
            scalar. It is averaged over the ranks, so terms that depend on rows must be means over
            them.
        increments: What these rows add to the sums of the model's own metrics: pytree of arrays.
    """

    outputs: Any
    model_state: Any
    penalty: jax.Array | float
    increments: Any = ()


class Adapter(Protocol):
    """A model as pure functions; the step calls `apply` inside `shard_map` over the axis `data`.

    The methods with a body say what is true of a model without variables or metrics of its own.

    Attributes:
        name: Name of the model in tables.
        holds_variables: Whether the user's object holds variables, into which `write_back` writes.
        knows_penalty: Whether the penalty of a part of a batch is its share, whatever the model
            adds; otherwise it must be a mean over rows.
    """

    name: str
    holds_variables: bool
    knows_penalty: bool

    def sample_inputs(self) -> Any:
        """Returns inputs to build the model with, or None if the model does not know them."""

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns fresh variables for inputs like `inputs`, a pytree of arrays `[rows, ...]`."""
        ...

    def initializer(self, inputs: Any, *, seed: int) -> Callable[[], Variables] | None:
        """Returns a function like `init` that JAX can trace; None if the variables exist."""

    def fresh_variables(self, inputs: Any, *, seed: int) -> FreshVariables | None:
        """Returns the program that makes what `init` returns; None if that exists."""

    def attach(self, inputs: Any) -> None:
        """Prepares, in place of `init`, to compute with variables of another model."""

    def apply(
        self,
        params: Any,
        model_state: Any,
        inputs: Any,
        *,
        key: jax.Array | None,
        train: bool,
        mask: jax.Array | None,
    ) -> Applied:
        """Returns the forward pass over this rank's rows.

        Args:
            params: Trained arrays.
            model_state: Arrays that the model updates itself.
            inputs: Pytree of arrays `[rows, ...]`.
            key: This rank's key for this step, or for these rows of the data in evaluation; None
                for that of the first rows.
            train: Whether dropout and batch statistics are on.
            mask: float32 `[rows]`, 0 for padded rows that must not enter batch statistics; None
                when there are none.
        """
        ...

    def axis_names(self) -> Mapping[str, tuple[str | None, ...]]:
        """Returns logical names of the dimensions of parameters by path, but for Linen's boxes."""
        return {}

    def held_variables(self) -> Mapping[str, Any]:
        """Returns a Keras model's variables, as Keras objects, by the paths of their arrays."""
        return {}

    def held_metrics(self) -> dict[str, Any]:
        """Returns the model's own metrics, as objects of its library, by their log names."""
        return {}

    def metric_results(self, sums: Any) -> dict[str, float]:
        """Returns the results of the model's own metrics, from sums of `Applied.increments`."""
        return {}

    def export(self, variables: Variables) -> Any:
        """Returns variables in the form that the model's library uses."""
        ...

    def trains_others(self) -> bool:
        """Returns whether the user's object trains or computes otherwise than when last read."""
        return False

    def has_assigned(self) -> bool:
        """Returns whether arrays were assigned to the user's object since last read."""
        return False

    def with_assigned(self, variables: Variables) -> Variables:
        """Returns variables with the arrays that were assigned to the user's object."""
        return variables

    def write_back(self, variables: Variables) -> None:
        """Stores trained variables in the user's own object, if it holds any."""


def check_trains_the_same(adapter: Adapter) -> None:
    """Raises a ValueError if the user's object has come to train other variables in a call."""
    if adapter.trains_others():
        raise ValueError(
            f"A layer of the model {adapter.name!r} was changed, frozen or unfrozen while the "
            "model was being trained. Do so between two calls of fit."
        )


@dataclass(frozen=True)
class CallStyle:
    """How a module must be called, according to the signature of its call method."""

    flags: tuple[str, ...]  # They tell training from inference.
    unpack: bool  # Whether a tuple of inputs is passed by position.
    names: tuple[str, ...]  # By which a dict of inputs is passed.
    required: frozenset[str]
    positional: tuple[str, ...]
    is_variadic: bool

    @classmethod
    def of(cls, call: Callable) -> "CallStyle":
        """Returns the style of a bound call method."""
        parameters = inspect.signature(call).parameters.values()
        flags = tuple(p.name for p in parameters if p.name in TRAIN_FLAGS)
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        # Random streams are not inputs: tnt_jax passes them to an NNX module.
        inputs = [p for p in parameters if p.name not in (*flags, "rngs")]
        named = [p for p in inputs if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        return cls(
            flags=flags,
            unpack=variadic or len(positional) > 1,
            names=tuple(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is p.empty),
            positional=tuple(p.name for p in positional),
            is_variadic=variadic,
        )

    @property
    def num_required(self) -> int:
        """Number of positional arguments without a default."""
        return sum(name in self.required for name in self.positional)

    def arguments(self, inputs: Any, *, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments for one call.

        A dict whose keys are argument names is passed by name, a tuple or list by position if the
        module takes several arguments; anything else is the one argument. A dict that lacks
        required keys or has unknown ones is a `CallError`.
        """
        flags = {flag: TRAIN_FLAGS[flag] is train for flag in self.flags}
        if isinstance(inputs, (tuple, list)) and self.unpack:
            return tuple(inputs), flags
        if not isinstance(inputs, Mapping) or not inputs:
            return (inputs,), flags
        if not set(inputs) & set(self.names) and len(self.required) <= 1:
            return (inputs,), flags
        if not self.required <= set(inputs) <= set(self.names):
            raise CallError(
                f"The module's call takes {', '.join(self.names)}, but the inputs are a dict with "
                f"the keys {', '.join(map(str, inputs))}. Let the keys be the names of the "
                "arguments."
            )
        return (), {**inputs, **flags}


class VariablePath(str):
    """A path in a library that numbers objects, with the variable's name in files.

    The library numbers the parts of a key such as `dense_3/kernel` anew for every object, while
    `saved_as` depends only on the structure of the model. It equals the plain string. Two of them
    are equal if they also have the same name in files.
    """

    __slots__ = ("saved_as",)
    saved_as: str

    def __new__(cls, path: str, saved_as: str) -> Self:
        """Returns the path, with the name beside it."""
        made = super().__new__(cls, path)
        made.saved_as = saved_as
        return made

    def __eq__(self, other: object) -> bool:
        saved_as = getattr(other, "saved_as", self.saved_as)
        return str.__eq__(self, other) is True and self.saved_as == saved_as

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (str(self), self.saved_as)
