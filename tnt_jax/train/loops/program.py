"""The program of a distributed step: what one rank runs, inside `shard_map`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.adapters.any_flax import flax_batch_norm_off, padding_left_out
from tnt_jax.adapters.forward_passes import with_varying_loops
from tnt_jax.distributed.sums.random_rows import Draws, batch_key, key_for
from tnt_jax.distributed.sums.reduction import Reduction
from tnt_jax.train.contracts import Batch
from tnt_jax.train.loops.context import StepContext, SummedMetric, tracing
from tnt_jax.train.steps.epoch_sums import num_local_rows
from tnt_jax.train.steps.micro_batches import in_passes
from tnt_jax.train.steps.row_dependence import Exchanged, Mixed, dependences
from tnt_jax.train.steps.step import BY_ROW, REPLICATED, STACKED


def sums_again(jaxpr: Any) -> bool:
    """Returns whether a program sums over the ranks a value that it computes equal on all."""
    spread = set()
    for equation in jaxpr.eqns:
        if any(sums_again(inner) for inner in _jax.jaxprs_in_params(equation.params)):
            return True
        name = equation.primitive.name
        computed = [x for x in equation.invars if isinstance(x, _jax.Var)]
        if name in ("pvary", "pcast") and computed and computed[0] not in jaxpr.constvars:
            spread.update(equation.outvars)
        if name.startswith("psum") and spread.intersection(computed):
            return True
    return False


def check_state(name: str, before: Any, after: Any) -> Any:
    """Returns the state that a step returned as arrays, if it is like that which it was given."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(
            f"{name} must return a state of the structure that it was given, "
            f"{jax.tree.structure(before)}, but returned {jax.tree.structure(after)}."
        )
    old = jax.tree.leaves(before)
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(after)
    leaves = []
    for (path, leaf), given in zip(paths_and_leaves, old, strict=True):
        where = f"The state{jax.tree_util.keystr(path)} that {name} returned"
        leaf = jnp.asarray(leaf)
        if _jax.is_varying(leaf):
            raise TypeError(
                f"{where} differs between ranks: it follows from each rank's own rows. Take "
                f"gradients by tnt_jax.value_and_grad, give BatchNorm axis_name='data', and "
                f"average statistics of a rank's own rows by jax.lax.pmean(x, 'data'). See "
                "docs/faq.md#a-step-or-a-result-differs-between-ranks."
            )
        if (leaf.shape, leaf.dtype) != (given.shape, given.dtype):
            raise TypeError(
                f"{where} is {leaf.dtype}{list(leaf.shape)}, but was {given.dtype}"
                f"{list(given.shape)} before. A step must leave shapes and dtypes as they are."
            )
        leaves.append(leaf)
    return structure.unflatten(leaves)


def check_metrics(name: str, metrics: Any) -> Any:
    """Returns the metrics of a step as arrays; a TypeError if one differs between ranks."""
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(metrics)
    for path, leaf in paths_and_leaves:
        if hasattr(leaf, "aval") and _jax.is_varying(leaf):
            raise TypeError(
                f"The result{jax.tree_util.keystr(path)} of {name} differs between ranks, each of "
                f"which has seen its own rows. Say what it is for the global batch: "
                f"tnt_jax.reduce(x, 'mean'), 'sum', 'max', 'min' or 'concat' of values for each "
                f"row; a loss is made by tnt_jax.compute_average_loss. See "
                "docs/faq.md#a-step-or-a-result-differs-between-ranks."
            )
    return structure.unflatten([jnp.asarray(leaf) for _, leaf in paths_and_leaves])


@dataclass(frozen=True)
class Program:
    """A user's step for a rank."""

    function: Callable
    name: str
    platform: str
    reduction: Reduction
    takes_key: bool
    trains: bool  # Whether it returns a state.
    rows_at_once: int | None = None  # Most whose gradients are computed in one pass; None for all.
    draws: dict[Any, Draws] = field(default_factory=dict, compare=False)

    def mapped(self, mesh: Any, *, stacked: bool) -> Callable:
        """Returns the function `(state, sums, batch, words) -> (state, sums, metrics)`.

        It runs over all ranks, and scans stacked batches; `sums` are the totals of the metrics, and
        the number of the step. If the step does not train, the resulting state is None.
        """
        specs = (REPLICATED, REPLICATED, STACKED if stacked else BY_ROW, REPLICATED)
        function = self._several if stacked else self._one
        return _jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=REPLICATED)

    def prepared(
        self, mesh: Mesh, state: Any, batch: Batch, words: Any, *, in_passes: bool = False
    ) -> tuple[list[SummedMetric], list[Any], str | None]:
        """Returns what tracing the program tells, after all checks that types allow.

        These are the metrics that it updates, in the order of their first updates, the shapes of
        what each adds up, and, if there are several ranks or it may run `in_passes`, the name of
        an operation that combines rows of the batch; None if there is none.
        """
        # On one rank nothing differs, so that types tell nothing: it is traced for two.
        several = max(mesh.size, 2)
        records: list[tuple[SummedMetric, Any]] = []

        def alike(x: Any, factor: int = 1) -> jax.ShapeDtypeStruct:
            shape = jnp.shape(x)
            shape = (shape[0] * factor, *shape[1:]) if factor > 1 else shape
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

        def collecting(state: Any, number: Any, batch: Batch, words: Any) -> Any:
            context, state, metrics = self._traced(state, number, batch, words)
            records[:] = context.records
            return state, metrics, context.recorded_sums()

        mapped = _jax.shard_map(
            collecting,
            mesh=_jax.abstract_data_mesh(several),
            in_specs=(REPLICATED, REPLICATED, BY_ROW, REPLICATED),
            out_specs=REPLICATED,
        )
        operands = (
            jax.tree.map(alike, state),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.tree.map(lambda x: alike(x, several // mesh.size), batch),
            jax.tree.map(alike, words),
        )
        traced, shapes = jax.make_jaxpr(mapped, return_shape=True)(*operands)
        if sums_again(traced.jaxpr):
            raise TypeError(
                f"{self.name} sums over the ranks what is the same on every rank already, which "
                "multiplies it by their number (jax.lax.psum) or does nothing (jax.lax.pmean). "
                "Gradients of tnt_jax.value_and_grad and results of tnt_jax.reduce and "
                "compute_average_loss are global: leave the psum or pmean out."
            )
        metrics = [metric for metric, _ in records]
        is_shared = mesh.size > 1 or in_passes
        operation = comparison_of_rows(mapped, operands, traced) if is_shared else None
        return metrics, shapes[2], operation

    def _one(self, state: Any, carried: Any, batch: Batch, words: Any) -> Any:
        totals, number = carried
        context, new_state, metrics = self._traced(state, number, batch, words)
        assert len(totals) == len(context.records), "A step must update the same metrics always."
        added = context.recorded_sums()
        totals = jax.tree.map(lambda total, new: (total + new).astype(total.dtype), totals, added)
        return new_state, (totals, number + 1), metrics

    def _several(self, state: Any, carried: Any, batches: Batch, words: Any) -> Any:
        def body(carry: tuple[Any, Any], batch: Batch) -> tuple[Any, Any]:
            new_state, carried, metrics = self._one(*carry, batch, words)
            return (new_state if self.trains else carry[0], carried), metrics

        (new_state, carried), metrics = jax.lax.scan(body, (state, carried), batches)
        return new_state if self.trains else None, carried, metrics

    def _traced(
        self, state: Any, number: Any, batch: Batch, words: Any
    ) -> tuple[StepContext, Any, Any]:
        """Runs the user's function on a rank's rows; returns the context, state and metrics."""
        key = None
        if words is not None:

            def results(key: jax.Array, batch: Batch) -> Any:
                # A step may change NNX modules, those of its own trace alone.
                own = jax.tree.map(lambda x: x, state)
                return jax.tree.leaves(all_rows._run(own, number, batch, key)[1:])

            all_rows = replace(self, rows_at_once=None)

            key = key_for(
                results, batch_key(words, number, num_local_rows(batch)), batch, self.draws
            )
        return self._run(state, number, batch, key)

    def _run(
        self, state: Any, number: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[StepContext, Any, Any]:
        context = StepContext(
            self.name,
            self.platform,
            self.reduction,
            batch,
            number,
            key=key,
            tells_varying=jax.lax.axis_size(_jax.DATA_AXIS) > 1,
            rows_at_once=self.rows_at_once,
        )
        arguments = (state, batch, context.key) if self.takes_key else (state, batch)
        # Loops of a training step may carry the state, which must not differ between ranks.
        function = self.function if self.trains else with_varying_loops(self.function)
        with tracing(context), padding_left_out(batch.mask):
            result = function(*arguments)
        if in_passes(context.num_rows, self.rows_at_once).num_parts > 1 and not context.has_passes:
            raise ValueError(
                f"{self.name} computes no gradient with tnt_jax.value_and_grad or tnt_jax.grad, "
                "which alone compute rows in several passes. Call one of them, or leave "
                "rows_at_once out of tnt_jax.distributed_step."
            )
        if not self.trains:
            return context, None, check_metrics(self.name, result)
        if not isinstance(result, tuple) or len(result) != 2:
            kind = type(result).__name__
            found = f"a tuple of {len(result)}" if isinstance(result, tuple) else kind
            raise TypeError(
                f"{self.name} must return a pair (state, metrics), but returned {found}. Return "
                "{} for no metrics."
            )
        new_state = check_state(self.name, state, result[0])
        return context, new_state, check_metrics(self.name, result[1])


def comparison_of_rows(mapped: Callable, operands: tuple[Any, ...], traced: Any) -> str | None:
    """Returns the operation by which values of a row depend on other rows, if one is found."""
    # The operands are the state, the number of the step, the batch, and the words of the key.
    holds_rows = [at == 2 for at, part in enumerate(operands) for _ in jax.tree.leaves(part)]
    _, marks = dependences(traced.jaxpr, holds_rows)
    if Exchanged() in marks:
        # Synchronised statistics would hide what else combines rows.
        with flax_batch_norm_off():
            traced = jax.make_jaxpr(lambda *operands: mapped(*operands))(*operands)
        _, marks = dependences(traced.jaxpr, holds_rows)
    return next((str(x) for x in marks if isinstance(x, Mixed)), None)
