"""Sums over a global batch: measured by chunk, one per virtual rank, and added in one order.

The counts of the loss terms come first, in a program of their own unless they follow from the
batch's shapes, because each chunk divides by those of the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.distributed.sums.random_rows import data_key, row_key, step_key
from tnt_jax.distributed.sums.reduction import flatten, groups_of_small, split_like
from tnt_jax.reproducible.virtual_ranks import BY_RANK, REPLICATED, VirtualRanks, device_program
from tnt_jax.train.contracts import Batch, Measured, Parts
from tnt_jax.train.steps.epoch_sums import num_local_rows, quotient, weighted_sum

_ADVICE = (
    "With reproducible=True a model must not look at other ranks, because what they hold depends "
    "on the number of devices. Leave out "
    "axis_name (statistics are then those of a virtual rank), or train with reproducible=False."
)


# A larger array is sent separately: a copy would cost memory and more time than it saves.
_LARGE_BYTES = 2**18


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Packed:
    """A pytree of arrays whose small leaves are concatenated by dtype into arrays `[1, n]`."""

    arrays: tuple[Any, ...]
    structure: Any = field(metadata={"static": True})
    shapes: tuple[Any, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> "Packed":
        """Packs a pytree of arrays or numbers."""
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        groups = groups_of_small(shapes, _LARGE_BYTES)
        arrays = tuple(_join([leaves[index] for index in group])[None] for group in groups)
        return cls(arrays, structure, shapes)

    def unpack(self) -> Any:
        """Returns the pytree."""
        leaves: dict[int, jax.Array] = {}
        groups = groups_of_small(self.shapes, _LARGE_BYTES)
        for array, group in zip(self.arrays, groups, strict=True):
            parts = split_like(array.reshape(-1), [self.shapes[index] for index in group])
            leaves.update(zip(group, parts, strict=True))
        return self.structure.unflatten(leaves[index] for index in range(len(self.shapes)))


def _join(arrays: list[jax.Array]) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else flatten(arrays)


class ModelArrays(NamedTuple):
    """Arrays of the state that a program needs; `key` and its step are None outside training."""

    params: Any
    model_state: Any
    key: tuple[jax.Array, jax.Array] | None
    first_row: jax.Array | int = 0
    loss_scale: jax.Array | None = None


class Counts(NamedTuple):
    """The count of each loss term, None for no division, and the real rows of a global batch."""

    terms: list[Any]
    rows: Any


class BatchSum:
    """Maps model and batch to the sums of `measure`, what all chunks share, and the real rows."""

    def __init__(self, parts: Parts, measure: Callable, ranks: VirtualRanks) -> None:
        def work(
            chunk: Batch, index: jax.Array, model: ModelArrays, counts: Counts
        ) -> tuple[Any, Any]:
            sums, same = measure(
                chunk, index, _with_step_key(model), jax.tree.map(jnp.squeeze, counts)
            )
            return _jax.make_varying(Packed.of(sums)), same

        specs = (BY_RANK, REPLICATED, REPLICATED, REPLICATED)
        self._program = device_program(
            work, ranks.mesh, in_specs=specs, out_specs=(BY_RANK, REPLICATED)
        )
        self._count = _BatchCount(parts, ranks)
        self._ranks = ranks

    def __call__(self, model: ModelArrays, batch: Batch) -> tuple[Any, Any, Any]:
        """Returns the sums, what is the same for every chunk, and the real rows."""
        counts = self._count(model, batch)
        return *self._ranks.sum(self._program, batch, model, counts), counts.rows

    def trace(
        self, model: ModelArrays, batch: Batch
    ) -> tuple[dict[str, Any], tuple[Any, Any, Any]]:
        """Returns the traced programs by name, and the shapes of the result."""
        counts = self._count(model, batch)
        arguments = (self._ranks.chunk_shapes(batch), 0, shapes_of(model), shapes_of(counts))
        sums, same = jax.eval_shape(self._program, *arguments)
        programs = (
            self._count.trace(model, batch)
            | {"chunk": self._program.trace(*arguments)}
            | self._ranks.trace_sum(sums)
        )
        return programs, (sums, same, shapes_of(counts.rows))


class _BatchCount:
    """Maps model and batch to the counts of the batch; runs nothing if shapes tell them."""

    def __init__(self, parts: Parts, ranks: VirtualRanks) -> None:
        self._ranks = ranks
        self._known: list[Any] = []
        self._by_shape: dict[Any, list[Any]] = {}

        def work(
            chunk: Batch, index: jax.Array, model: ModelArrays
        ) -> tuple[list[jax.Array], None]:
            def count(chunk: Batch) -> list[jax.Array]:
                counts = [
                    term.count
                    for term in measure_chunk(parts, _with_step_key(model), chunk, index).terms
                ]
                self._known = [_UNKNOWN if isinstance(x, jax.Array) else x for x in counts]
                rows = [] if chunk.mask is None else [jnp.sum(chunk.mask)]
                return [x.astype(jnp.float32) for x in counts if isinstance(x, jax.Array)] + rows

            _jax.check_local(count, chunk, advice=_ADVICE)
            # The compiler leaves nothing of the forward pass: counts depend on targets, weights and
            # the mask alone.
            return _jax.make_varying([jnp.asarray(x)[None] for x in count(chunk)]), None

        specs = (BY_RANK, REPLICATED, REPLICATED)
        self._program = device_program(
            work, ranks.mesh, in_specs=specs, out_specs=(BY_RANK, REPLICATED)
        )

    def __call__(self, model: ModelArrays, batch: Batch) -> Counts:
        known = self._known_counts(model, batch)
        sums = iter(
            self._ranks.sum(self._program, batch, model)[0] if self._is_needed(known, batch) else ()
        )
        known = [x if x is None or x is _UNKNOWN else float(x * self._ranks.count) for x in known]
        terms = [next(sums) if x is _UNKNOWN else x for x in known]
        return Counts(terms, float(num_local_rows(batch)) if batch.mask is None else next(sums))

    def trace(self, model: ModelArrays, batch: Batch) -> dict[str, Any]:
        """Returns the traced programs by name, if any is needed."""
        if not self._is_needed(self._known_counts(model, batch), batch):
            return {}
        arguments = (self._ranks.chunk_shapes(batch), 0, shapes_of(model))
        sums = self._ranks.trace_sum(jax.eval_shape(self._program, *arguments)[0])
        return {"counts": self._program.trace(*arguments)} | {
            f"counts, {name}": program for name, program in sums.items()
        }

    def _is_needed(self, known: list[Any], batch: Batch) -> bool:
        return batch.mask is not None or _UNKNOWN in known

    def _known_counts(self, model: ModelArrays, batch: Batch) -> list[Any]:
        leaves, structure = jax.tree.flatten(batch)
        shapes = (structure, tuple((x.shape, x.dtype) for x in leaves))
        if shapes not in self._by_shape:
            jax.eval_shape(self._program, self._ranks.chunk_shapes(batch), 0, shapes_of(model))
            self._by_shape[shapes] = self._known
        return self._by_shape[shapes]


_UNKNOWN = "unknown"


def shapes_of(tree: Any) -> Any:
    """Returns the shapes and dtypes of arrays; Python numbers stay."""
    return jax.tree.map(
        lambda x: x if isinstance(x, (int, float)) else jax.ShapeDtypeStruct(x.shape, x.dtype), tree
    )


def _with_step_key(model: ModelArrays) -> ModelArrays:
    if model.key is None:
        return model
    words, step = model.key
    return model._replace(key=step_key(words, step))  # pyright: ignore[reportArgumentType]


def measure_chunk(parts: Parts, model: Any, chunk: Batch, index: jax.Array) -> Measured:
    """Returns what a step measures on the chunk with number `index`."""
    num_rows = num_local_rows(chunk)
    train = model.key is not None
    first_row = jnp.asarray(model.first_row, jnp.uint32) + index * num_rows
    key = row_key(model.key, first_row) if train else data_key(first_row)
    return parts.measure(model.params, model.model_state, chunk, key=key, train=train)


def numbers_of_chunk(
    measured: Measured, counts: Counts, num_chunks: int
) -> tuple[jax.Array, list[jax.Array], Any]:
    """Returns a chunk's parts of the loss and of each loss of the global batch, and increments."""
    pairs = zip(measured.terms, counts.terms, strict=True)
    losses = [quotient(term, count) for term, count in pairs]
    loss = weighted_sum(losses, measured.terms, measured.penalty / num_chunks)
    return _jax.make_varying(jnp.asarray(loss, jnp.float32)), losses, measured.increments
