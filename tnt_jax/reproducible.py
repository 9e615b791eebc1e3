"""Steps whose results have the same bits on any number of devices and processes; `step.py` holds the fast ones.

The rounding of a sum depends on its order, and the rounding of a program on how it was compiled. So a global batch is always cut
into the chunks of V virtual ranks, one program that is the same on every number of devices (`device_program.py`) works on a chunk,
the results are added in one order (`virtual_ranks.py`), and the update is a program of its own: compiled together with the last
addition, it would round differently. The chunks of a device are no loop inside a program: XLA's convolutions on a CPU are eight times
slower there.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tnt_jax import _jax
from tnt_jax.accumulation import accumulate
from tnt_jax.collectives import check_can_be_averaged
from tnt_jax.device_program import BY_RANK, REPLICATED, Programs, device_program, join, split
from tnt_jax.log import logger
from tnt_jax.packed import Packed
from tnt_jax.random_rows import row_key, step_key
from tnt_jax.state import TrainState
from tnt_jax.step import Apply, Batch, Measured, Parts, add_sums, num_local_rows, quotient
from tnt_jax.virtual_ranks import VirtualRanks, check_count

_ADVICE = (
    "With reproducible=True a model must not look at other ranks, because what they hold depends on the number of devices. Leave out "
    "axis_name (statistics are then those of a virtual rank), or train with reproducible=False."
)


class _Model(NamedTuple):
    """What a program needs of the state: parameters, model state, and the words of the run's key with the step, or None."""

    params: Any
    model_state: Any
    key: tuple[jax.Array, jax.Array] | None


class _Counts(NamedTuple):
    """What the whole global batch adds up to: the count of each loss term (None leaves it undivided), and the real rows."""

    terms: list[Any]
    rows: Any


def check_reproducible(virtual_ranks: int, gradient_compression: str | None, shard_optimizer_state: bool) -> None:
    """Checks the options of reproducible training and prepares JAX for it, where it is not in use yet.

    Raises:
        ValueError: If `virtual_ranks` is no power of two, or an option belongs to the fast steps.
    """
    check_count(virtual_ranks)
    for name, value in (("gradient_compression", gradient_compression), ("shard_optimizer_state", shard_optimizer_state)):
        if value:
            raise ValueError(
                f"{name}={value!r} changes how gradients are summed, which reproducible=True fixes. Leave one of them out."
            )
    _fix_cpu_threads(virtual_ranks)


def _fix_cpu_threads(virtual_ranks: int) -> None:
    """Gives JAX's pool of CPU threads the size `2 * virtual_ranks`, on which the rounding of large matrix products depends.

    It must be called before JAX opens its devices; afterwards it only warns, if the pool is of another size.
    """
    threads = str(2 * virtual_ranks)
    if not _jax.backends_are_initialized():
        os.environ["PJRT_NPROC"] = threads
    elif jax.default_backend() == "cpu" and os.environ.get("PJRT_NPROC") != threads:
        logger.warning(
            "JAX was in use before the reproducible model was made, so its pool of CPU threads keeps its size (PJRT_NPROC=%s): results "
            "equal those of runs with the same size only. Make the model first, or set PJRT_NPROC=%s before the start.",
            os.environ.get("PJRT_NPROC", "unset"),
            threads,
        )


def make_train_step(
    parts: Parts, optimizer: optax.GradientTransformation, ranks: VirtualRanks, *, accumulation_steps: int = 1
) -> Callable:
    """Returns the function `(state, sums, batch) -> (state, sums)`.

    `state` is donated; `sums` is not, so that a reader may look at the sums of any step later.

    Args:
        parts: What the step computes.
        optimizer: Optax transformation, given gradients of the loss of the whole global batch.
        ranks: Virtual ranks.
        accumulation_steps: Steps whose mean gradient makes one update; `state.accumulated` holds the sums of whole batches `[1, ...]`.
    """

    def measure(chunk: Batch, index: jax.Array, model: _Model, counts: _Counts) -> tuple[Any, Any]:
        def objective(params: Any) -> tuple[jax.Array, Measured]:
            measured = _measure(parts, model._replace(params=params), chunk, index)
            return _loss(measured, counts, ranks.count), measured

        (loss, measured), grads = jax.value_and_grad(objective, has_aux=True)(_jax.make_varying(model.params))
        rows = num_local_rows(chunk) if chunk.mask is None else jnp.sum(chunk.mask)
        averaged, same = _split_state(measured.model_state, rows / counts.rows)
        return (grads, (loss, _losses(measured, counts), measured.increments), averaged), same

    def update(grads: Any, params: Any, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def conclude(state: TrainState, sums: Any, measured: Packed, same: Any, rows: jax.Array) -> tuple[TrainState, Any]:
        grads, (loss, losses, increments), averaged = measured.unpack()
        if accumulation_steps == 1:
            params, opt_state = update(grads, state.params, state.opt_state)
            accumulated = None
        else:
            params, opt_state, accumulated = accumulate(state, grads, lambda tree: tree, update, accumulation_steps)
        model_state = _join_state(state.model_state, averaged, same)
        new_state = replace(
            state, step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state, accumulated=accumulated
        )
        return new_state, add_sums(sums, loss, losses, increments, jnp.squeeze(rows))

    return _TrainStep(_BatchSum(parts, measure, ranks), _ReplicatedProgram(conclude, ranks, donate=(0,)))


class _TrainStep(NamedTuple):
    """A training step in parts: what is summed over the batch, and the program that concludes it."""

    sum_batch: "_BatchSum"
    last: "_ReplicatedProgram"

    def __call__(self, state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        return self.last(state, sums, *self.sum_batch(_model(state), batch))

    def lower(self, state: TrainState, sums: Any, batch: Batch) -> Programs:
        """Returns the lowered programs of the step: of a chunk, of the sum over ranks, of the update, and others that it runs."""
        programs, measured = self.sum_batch.lower(_model(state), batch)
        return Programs(programs | {"update": self.last.program.lower(*_shapes((state, sums, *measured)))})


def _model(state: TrainState) -> _Model:
    return _Model(state.params, state.model_state, (state.key, state.step))


def make_eval_step(parts: Parts, ranks: VirtualRanks) -> Callable:
    """Returns the function `(params, model_state, sums, batch) -> sums`."""

    def measure(chunk: Batch, index: jax.Array, model: _Model, counts: _Counts) -> tuple[Any, Any]:
        measured = _measure(parts, model, chunk, index)
        return (_loss(measured, counts, ranks.count), _losses(measured, counts), measured.increments), None

    def conclude(sums: Any, measured: Packed, same: None, rows: jax.Array) -> Any:
        loss, losses, increments = measured.unpack()
        return add_sums(sums, loss, losses, increments, jnp.squeeze(rows))

    sum_batch = _BatchSum(parts, measure, ranks)
    last = _ReplicatedProgram(conclude, ranks)
    return lambda params, model_state, sums, batch: last(sums, *sum_batch(_Model(params, model_state, None), batch))


def make_predict_step(apply: Apply, ranks: VirtualRanks) -> Callable:
    """Returns the function `(params, model_state, inputs) -> outputs`, with outputs `[rows, ...]` sharded by row."""

    def work(chunk: Any, params: Any, model_state: Any) -> Any:
        return _jax.make_varying(apply(params, model_state, chunk, key=None, train=False, mask=None).outputs)

    program = device_program(work, ranks.mesh, in_specs=(BY_RANK, REPLICATED, REPLICATED), out_specs=BY_RANK)
    return lambda params, model_state, inputs: ranks.map(program, inputs, params, model_state)


class _BatchSum:
    """From model and batch to the sums of `measure`, what is the same for every chunk, and the real rows."""

    def __init__(self, parts: Parts, measure: Callable, ranks: VirtualRanks) -> None:
        def work(chunk: Batch, index: jax.Array, model: _Model, counts: _Counts) -> tuple[Any, Any]:
            sums, same = measure(chunk, index, _with_step_key(model), jax.tree.map(jnp.squeeze, counts))
            return _jax.make_varying(Packed.of(sums)), same

        specs = (BY_RANK, REPLICATED, REPLICATED, REPLICATED)
        self._program = device_program(work, ranks.mesh, in_specs=specs, out_specs=(BY_RANK, REPLICATED))
        self._count, self._ranks = _BatchCount(parts, ranks), ranks

    def __call__(self, model: _Model, batch: Batch) -> tuple[Any, Any, Any]:
        counts = self._count(model, batch)
        return *self._ranks.sum(self._program, batch, model, counts), counts.rows

    def lower(self, model: _Model, batch: Batch) -> tuple[dict[str, Any], tuple[Any, Any, Any]]:
        """Returns the lowered programs by name, and the shapes of the result."""
        counts = self._count(model, batch)
        arguments = (self._ranks.chunk_shapes(batch), 0, _shapes(model), _shapes(counts))
        sums, same = jax.eval_shape(self._program, *arguments)
        programs = self._count.lower(model, batch) | {"chunk": self._program.lower(*arguments)} | self._ranks.lower_sum(sums)
        return programs, (sums, same, _shapes(counts.rows))


class _ReplicatedProgram:
    """A function of replicated arrays as a program that every device runs for itself."""

    def __init__(self, function: Callable, ranks: VirtualRanks, *, donate: tuple[int, ...] = ()) -> None:
        self.program = device_program(function, ranks.mesh, in_specs=REPLICATED, out_specs=REPLICATED, donate=donate)
        self._mesh = ranks.mesh

    def __call__(self, *args: Any) -> Any:
        return join([self.program(*own) for own in split(args, self._mesh)], self._mesh, REPLICATED)


class _BatchCount:
    """From model and batch to the counts of the batch; those that follow from shapes start no program."""

    def __init__(self, parts: Parts, ranks: VirtualRanks) -> None:
        self._ranks = ranks
        self._known: list[Any] = []
        self._by_shape: dict[Any, list[Any]] = {}

        def work(chunk: Batch, index: jax.Array, model: _Model) -> tuple[list[jax.Array], None]:
            def count(chunk: Batch) -> list[jax.Array]:
                counts = [term.count for term in _measure(parts, _with_step_key(model), chunk, index).terms]
                self._known = [_UNKNOWN if isinstance(x, jax.Array) else x for x in counts]
                rows = [] if chunk.mask is None else [jnp.sum(chunk.mask)]
                return [x.astype(jnp.float32) for x in counts if isinstance(x, jax.Array)] + rows

            _jax.check_local(count, chunk, advice=_ADVICE)
            # The compiler leaves nothing of the forward pass: counts depend on targets, weights and the mask alone.
            return _jax.make_varying(_as_entries(count(chunk))), None

        specs = (BY_RANK, REPLICATED, REPLICATED)
        self._program = device_program(work, ranks.mesh, in_specs=specs, out_specs=(BY_RANK, REPLICATED))

    def __call__(self, model: _Model, batch: Batch) -> _Counts:
        known = self._known_counts(model, batch)
        sums = iter(self._ranks.sum(self._program, batch, model)[0] if self._is_needed(known, batch) else ())
        terms = [next(sums) if x is _UNKNOWN else None if x is None else float(x * self._ranks.count) for x in known]
        return _Counts(terms, float(num_local_rows(batch)) if batch.mask is None else next(sums))

    def lower(self, model: _Model, batch: Batch) -> dict[str, Any]:
        """Returns the lowered programs by name, if any is needed."""
        if not self._is_needed(self._known_counts(model, batch), batch):
            return {}
        arguments = (self._ranks.chunk_shapes(batch), 0, _shapes(model))
        sums = self._ranks.lower_sum(jax.eval_shape(self._program, *arguments)[0])
        return {"counts": self._program.lower(*arguments)} | {f"counts, {name}": program for name, program in sums.items()}

    def _is_needed(self, known: list[Any], batch: Batch) -> bool:
        return batch.mask is not None or _UNKNOWN in known

    def _known_counts(self, model: _Model, batch: Batch) -> list[Any]:
        leaves, structure = jax.tree.flatten(batch)
        shapes = (structure, tuple((x.shape, x.dtype) for x in leaves))
        if shapes not in self._by_shape:
            jax.eval_shape(self._program, self._ranks.chunk_shapes(batch), 0, _shapes(model))
            self._by_shape[shapes] = self._known
        return self._by_shape[shapes]


_UNKNOWN = "unknown"


def _shapes(tree: Any) -> Any:
    """Returns shapes in the place of arrays; Python numbers stay."""
    return jax.tree.map(lambda x: x if isinstance(x, (int, float)) else jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _as_entries(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _with_step_key(model: _Model) -> _Model:
    """Returns the model with the key of its step."""
    if model.key is None:
        return model
    words, step = model.key
    return model._replace(key=step_key(words, step))  # pyright: ignore[reportArgumentType]


def _measure(parts: Parts, model: Any, chunk: Batch, index: jax.Array) -> Measured:
    num_rows = num_local_rows(chunk)
    key = None if model.key is None else row_key(model.key, index * num_rows, num_rows)
    return parts.measure(model.params, model.model_state, chunk, key=key, train=key is not None)


def _loss(measured: Measured, counts: _Counts, num_chunks: int) -> jax.Array:
    """Returns a chunk's part of the loss of the global batch."""
    return _jax.make_varying(jnp.asarray(sum(_losses(measured, counts), start=measured.penalty / num_chunks), jnp.float32))


def _losses(measured: Measured, counts: _Counts) -> list[jax.Array]:
    return [quotient(term, count) for term, count in zip(measured.terms, counts.terms, strict=True)]


def _split_state(model_state: Any, share: jax.Array | float) -> tuple[dict[int, jax.Array], dict[int, Any]]:
    """Returns a chunk's part of the leaves that depend on the chunk, to be summed, and the leaves that do not, by position."""
    averaged, same = {}, {}
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(model_state)):
        if _jax.is_varying(leaf):
            check_can_be_averaged(path, leaf)
            averaged[index] = leaf * jnp.asarray(share, leaf.dtype)
        else:
            same[index] = leaf
    return averaged, same


def _join_state(like: Any, averaged: dict[int, Any], same: dict[int, Any]) -> Any:
    """Returns model state of the structure of `like` from the leaves of `_split_state`."""
    leaves = {**averaged, **same}
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[index] for index in sorted(leaves)])
