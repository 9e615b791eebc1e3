"""Context of a distributed step for functions inside it while it is traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax import _jax
from tnt_jax.distributed.sums.reduction import Reduction, psum
from tnt_jax.job import Slot
from tnt_jax.train.contracts import Batch
from tnt_jax.train.steps.epoch_sums import where_rows


class SummedMetric(Protocol):
    """A metric whose updates inside a step are summed over the ranks."""

    name: str

    def sums(self, like: Any) -> Any:
        """Returns the arrays of its state; before the first update zeros like `like`."""
        ...

    def replace_sums(self, sums: Any) -> None:
        """Replaces the arrays of its state."""


class Passes(NamedTuple):
    """The passes that a rank's rows are computed in."""

    num_passes: int
    real_rows: jax.Array | float  # Of the global batch.
    penalties: list[jax.Array]  # Those of the loss that a pass was traced with.


class LossOfPass:
    """Contribution of the rows of one of several passes to a loss of the global batch.

    Sums and multiples are that again; anything else would need the loss itself.
    """

    __array_ufunc__ = None  # Numbers of NumPy leave multiplication to this class.

    def __init__(self, value: jax.Array) -> None:
        self.value = value

    def __add__(self, other: Any) -> "LossOfPass":
        if isinstance(other, LossOfPass):
            return LossOfPass(self.value + other.value)
        if isinstance(other, int) and other == 0:  # The start of Python's sum().
            return self
        raise ValueError(
            "Something was added to a loss of the global batch that is none: "
            "tnt_jax.scale_regularization_loss(penalty) makes it of a penalty."
        )

    def __mul__(self, factor: Any) -> "LossOfPass":
        return LossOfPass(self.value * _factor(factor))

    def __truediv__(self, divisor: Any) -> "LossOfPass":
        return LossOfPass(self.value / _factor(divisor))

    def __neg__(self) -> "LossOfPass":
        return self * -1

    def __sub__(self, other: Any) -> "LossOfPass":
        return self + -other

    __radd__, __rmul__ = __add__, __mul__


def _factor(x: Any) -> jax.Array:
    if isinstance(x, LossOfPass) or _jax.is_varying(jnp.asarray(x)):
        raise ValueError(
            "Where rows are computed in several passes, a loss of the global batch is multiplied "
            "by numbers only, which do not depend on the rows."
        )
    return jnp.asarray(x)


@dataclass
class StepContext:
    """The step that is traced."""

    name: str  # Of the user's function.
    platform: str
    reduction: Reduction
    batch: Batch  # This rank's rows.
    step: jax.Array  # Number of the batch since the beginning, int32.
    key: jax.Array | None = None  # This rank's for the batch.
    tells_varying: bool = True  # Whether types tell what differs between ranks; not so on one.
    # This rank's parts of the losses that were made so far, by the identity of the loss; each with
    # the loss, which must live as long.
    parts: dict[int, tuple[jax.Array, jax.Array]] = field(default_factory=dict)
    # Metrics that were updated, and what this rank's rows add to each.
    records: list[tuple[SummedMetric, Any]] = field(default_factory=list)
    rows_at_once: int | None = None  # Most whose gradients are computed at once; None for all.
    of_all: Passes | None = None  # Within one of several passes, what is known of all of them.
    has_passes: bool = False  # Whether a gradient was computed in several passes.

    @property
    def num_rows(self) -> int:
        """Rows of this rank, padding included."""
        return jax.tree.leaves(self.batch.inputs)[0].shape[0]

    def sum(self, tree: Any) -> Any:
        """Returns the sums of a tree over the ranks."""
        return psum(_jax.make_varying(tree))

    def recorded_sums(self) -> list[Any]:
        """Returns what all ranks together add to the state of each metric that was updated."""
        # What is the same on every rank, such as the loss, was seen once.
        added = [increments for _, increments in self.records]
        local = [
            index
            for index, tree in enumerate(added)
            if not self.tells_varying or any(map(_jax.is_varying, jax.tree.leaves(tree)))
        ]
        known = dict(zip(local, self.sum([added[index] for index in local]), strict=True))
        return [known.get(index, tree) for index, tree in enumerate(added)]

    def record(self, metric: SummedMetric, added: Any) -> None:
        """Notes what this rank's rows add to the state of a metric."""
        for index, (known, before) in enumerate(self.records):
            if known is metric:
                self.records[index] = metric, jax.tree.map(jnp.add, before, added)
                return
        self.records.append((metric, added))

    @contextmanager
    def recording(self) -> Iterator[list[tuple[SummedMetric, Any]]]:
        """Collects the records of the `with` block, which is traced for itself."""
        outer, self.records = self.records, []
        try:
            yield self.records
        finally:
            self.records = outer


steps_in_use = Slot[set[str]](set, lasts=True)
"""The names of the distributed steps that this job has run, whose state the script holds."""
_current: ContextVar[StepContext | None] = ContextVar("distributed_step", default=None)


@contextmanager
def tracing(context: StepContext) -> Iterator[None]:
    """Makes a step the one that functions within are called in."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_step() -> StepContext | None:
    """Returns the step that is traced, or None."""
    return _current.get()


def require_step(function: str) -> StepContext:
    """Returns the step that is traced, for a public function; a RuntimeError without one."""
    context = _current.get()
    if context is None:
        raise RuntimeError(
            f"tnt_jax.{function} works inside a distributed step only, where it knows the global "
            "batch. Call it in a function that is decorated with tnt_jax.distributed_step."
        )
    return context


def needs_arguments(name: str) -> str:
    """Returns the error for a loss function that takes rows of all passes from around it."""
    return (
        f"{name} computes its rows in several passes, but its loss function uses rows of the "
        "batch, or a key, that are no arguments of it, or that were computed from these before. "
        "Pass the batch, or its arrays, and the key of the step: "
        "tnt_jax.value_and_grad(loss_fn)(params, batch, key)."
    )


def refuse_passes(name: str, reason: str) -> NoReturn:
    """Raises the error for a step whose results several passes would change."""
    raise ValueError(
        f"{name} cannot compute its rows in several passes: {reason}. Leave rows_at_once out of "
        "tnt_jax.distributed_step."
    )


def weight_of_real_rows(weight: ArrayLike | None, values: Any = None) -> ArrayLike | None:
    """Returns weights of `values` that are 0 on the padding of the step being traced, if one is."""
    context = _current.get()
    if context is None:
        return weight
    if values is not None and jnp.ndim(values) == 0:
        if hasattr(values, "aval") and _jax.is_varying(values):
            raise ValueError(
                "A metric was updated with a scalar that differs between ranks: a mean or sum of "
                "each rank's own rows. Pass the values of the rows, [rows], or the loss of "
                "tnt_jax.value_and_grad, which is the same on every rank."
            )
        return weight
    if context.batch.mask is None:
        return weight
    if weight is None:
        return context.batch.mask
    weight = jnp.asarray(weight)
    if weight.ndim == 0:
        return weight * context.batch.mask
    return where_rows(context.batch.mask, weight, 0)
