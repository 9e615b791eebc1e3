"""Gradients of the global batch's loss, inside a distributed step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.adapters.any_flax import padding_left_out
from tnt_jax.adapters.forward_passes import with_varying_loops
from tnt_jax.adapters.nnx import OpenModule, is_nnx_module
from tnt_jax.distributed.sums.random_rows import draws_by_row, key_of_fewer_rows
from tnt_jax.distributed.sums.reduction import sum_gradients, trace_grads
from tnt_jax.train.loops.context import (
    LossOfPass,
    Passes,
    StepContext,
    SummedMetric,
    needs_arguments,
    refuse_passes,
    require_step,
    tracing,
)
from tnt_jax.train.steps.epoch_sums import num_real_rows
from tnt_jax.train.steps.micro_batches import in_passes, sums_of_passes
from tnt_jax.train.steps.row_dependence import Free, dependences, is_by_row
from tnt_jax.train.steps.step import for_cpus


def value_and_grad(loss_fn: Callable, *, has_aux: bool = False) -> Callable:
    """Returns a function that computes a loss of the global batch and its gradient.

    It is called inside a distributed step.

    It is `jax.value_and_grad` for steps: the gradient is summed over the ranks in the buckets, in
    the order and by the engine of `fit`, and is the same on every rank. Nothing is left to sum.

    An NNX module may stand for the parameters: `loss_fn` is called with a copy of it, the gradient
    is that of its variables of type `nnx.Param`, and the others, such as moving statistics, are
    updated in the module. Its random streams are seeded by the key of the step and draw by the row
    of the global batch.

    Args:
        loss_fn: From parameters, and other arguments, to the loss of the global batch: a scalar
            made by `compute_average_loss`, plus `scale_regularization_loss` where there are
            penalties. With `has_aux`, to a pair of it and anything else.
        has_aux: Whether `loss_fn` returns a pair.

    Returns:
        A function from the arguments of `loss_fn` to the pair of its result and the gradient with
        respect to the first argument. What `loss_fn` returns besides the loss is this rank's.

    Raises:
        RuntimeError: If it is called outside a distributed step.
        TypeError: If the loss is no floating scalar.
        ValueError: If the loss is of this rank's rows alone.
    """

    @wraps(loss_fn)
    def differentiated(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        step = require_step("value_and_grad")
        if in_passes(step.num_rows, step.rows_at_once).num_parts > 1:
            return _InPasses(loss_fn, has_aux, step, (args, kwargs)).differentiated(params)

        def objective(params: Any) -> tuple[jax.Array, tuple[Any, Any]]:
            with step.recording() as records:
                result, variables = function(params, *args, **kwargs)
            loss, aux = _pair(result) if has_aux else (result, None)
            loss = _checked(loss)
            metrics[:] = [metric for metric, _ in records]
            others = aux, [added for _, added in records], variables
            _, part = step.parts.get(id(loss), (None, None))
            # A part alone makes the gradient of the sum, which then travels with the gradients.
            return (loss, (loss, others)) if part is None else (part, (None, others))

        metrics: list[SummedMetric] = []
        module, function, params = _opened(loss_fn, params, step.key)
        (value, (loss, others)), grads, order = _traced_grads(
            objective, _jax.make_varying(params), step
        )
        first = _jax.make_varying(value) if loss is None else ()
        summed = sum_gradients(grads, step.reduction, order=order, first=first)
        value = summed.first if loss is None else value
        aux, increments, variables = others
        if module is not None:
            module.close(variables)
        for metric, added in zip(metrics, increments, strict=True):
            step.record(metric, added)
        return ((value, aux) if has_aux else value), summed.grads

    return differentiated


def _opened(
    loss_fn: Callable, params: Any, key: jax.Array | None
) -> tuple[OpenModule | None, Callable, Any]:
    """Returns an opened NNX module or None, `loss_fn` with its other variables, and parameters."""
    if is_nnx_module(params):
        module = OpenModule(params, key)
        return module, with_varying_loops(module.pure(loss_fn)), module.params
    function = with_varying_loops(lambda *args, **kwargs: (loss_fn(*args, **kwargs), None))
    return None, function, params


def grad(loss_fn: Callable, *, has_aux: bool = False) -> Callable:
    """Returns a function that computes the gradient of a loss of the global batch.

    The arguments are those of `value_and_grad`.

    Returns:
        A function from the arguments of `loss_fn` to the gradient, or with `has_aux` to the pair of
        the gradient and what else `loss_fn` returns.
    """
    with_value = value_and_grad(loss_fn, has_aux=has_aux)

    @wraps(loss_fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def _traced_grads(objective: Callable, params: Any, step: StepContext) -> tuple[Any, Any, Any]:
    rewrite = partial(for_cpus, step=step.step) if step.platform == "cpu" else None
    return trace_grads(jax.value_and_grad(objective, has_aux=True), params, rewrite=rewrite)


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "With has_aux=True a loss function returns a pair (loss, other results), but it "
            f"returned a {type(result).__name__}."
        )
    return result


def _checked(loss: Any) -> Any:
    """Returns the loss of a user's function, if it is one of the global batch."""
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"A loss function returns a floating scalar, but it returned an array of {dtype} and "
            f"shape {shape}. Make it of the loss of each row by "
            "tnt_jax.compute_average_loss(per_row)."
        )
    if hasattr(loss, "aval") and _jax.is_varying(loss):
        raise ValueError(
            "The loss differs between ranks: each has that of its own rows, as jnp.mean gives it, "
            "or has added something that every rank computes. The loss of the global batch is "
            "tnt_jax.compute_average_loss(per_row), plus "
            "tnt_jax.scale_regularization_loss(penalty) for penalties."
        )
    return loss


class _Outcome(NamedTuple):
    """Results of a loss function for the rows of a pass, besides the loss."""

    values: list[jax.Array]  # Leaves of what it returns besides the loss; of losses their parts.
    increments: list[Any]  # What the rows add to each metric.
    variables: Any  # Other variables of an NNX module, after the call.
    penalties: list[jax.Array]  # Those of the loss.


class _InPasses:
    """A loss function whose gradient is summed over several passes over a rank's rows.

    In each, the arguments that are arrays of the batch have its rows alone, and keys draw for them
    what they draw in one pass.
    """

    def __init__(self, loss_fn: Callable, has_aux: bool, step: StepContext, arguments: Any) -> None:
        self._loss_fn, self._has_aux, self._step = loss_fn, has_aux, step
        step.has_passes = True
        self._rows = rows = in_passes(step.num_rows, step.rows_at_once)
        self._passes = Passes(rows.num_parts, num_real_rows(step.batch), [])
        self._leaves, self._arguments = jax.tree.flatten(arguments)
        batch = rows.cut_batch(step.batch)
        pairs = zip(step.batch, batch, strict=True)
        parts = {
            id(x): part
            for whole, cut in pairs
            for x, part in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=False)
        }
        own = [rows.keys(x) if draws_by_row(x) else parts.get(id(x)) for x in self._leaves]
        # What the passes take: arguments, or None for those that all share; rows; words of the key.
        self._micro = own, batch, rows.keys(step.key)
        # What tracing the function tells.
        self._metrics: list[SummedMetric] = []
        self._is_loss: list[bool] = []
        self._aux: Any = None

    def differentiated(self, params: Any) -> tuple[Any, Any]:
        step = self._step
        module, _, variables = _opened(self._loss_fn, params, step.key)
        variables = _jax.make_varying(variables)
        forward = partial(self._forward, params)
        self._check(forward, variables)

        def compute(micro: Any) -> tuple[Any, Any]:
            (value, outcome), grads, _ = _traced_grads(
                partial(forward, micro=micro), variables, step
            )
            losses, own = self._divided(outcome.values)
            return (value, losses, outcome.increments, grads), (own, outcome.variables)

        (value, losses, increments, grads), (own, after) = sums_of_passes(compute, self._micro)
        order = range(len(jax.tree.leaves(grads)))
        summed = sum_gradients(grads, step.reduction, order=order, first=(value, losses))
        if module is not None:
            module.close(jax.tree.map(lambda x: x[0], after))
        for metric, added in zip(self._metrics, increments, strict=True):
            step.record(metric, added)
        value, losses = summed.first
        if not self._has_aux:
            return value, summed.grads
        rows = map(self._rows.joined, own)
        totals = iter(losses)
        aux = [next(totals if is_loss else rows) for is_loss in self._is_loss]
        return (value, self._aux.unflatten(aux)), summed.grads

    def _divided(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns those values besides the loss that are losses, and the others."""
        pairs = list(zip(values, self._is_loss, strict=True))
        return [x for x, is_loss in pairs if is_loss], [x for x, is_loss in pairs if not is_loss]

    def _forward(self, params: Any, variables: Any, micro: Any) -> tuple[jax.Array, _Outcome]:
        """Calls the loss function with the rows of a pass."""
        parts, batch, words = micro
        num_rows = self._rows.part_rows

        def own(leaf: Any, part: Any) -> Any:
            if part is None:
                return leaf
            return key_of_fewer_rows(part, leaf, num_rows) if draws_by_row(leaf) else part

        key = self._step.key
        key = None if key is None else key_of_fewer_rows(words, key, num_rows)
        step = replace(
            self._step,
            batch=batch,
            key=key,
            parts={},
            records=[],
            rows_at_once=None,
            of_all=self._passes,
        )
        _, function, _ = _opened(self._loss_fn, params, key)
        args, kwargs = self._arguments.unflatten(map(own, self._leaves, parts))
        with tracing(step), padding_left_out(batch.mask):
            result, after = function(variables, *args, **kwargs)
        loss, aux = _pair(result) if self._has_aux else (result, None)
        if not isinstance(loss, LossOfPass):
            _checked(loss)
            raise ValueError(f"The loss does not depend on the batch: it is {loss}.")
        values, self._aux = jax.tree.flatten(aux)
        self._is_loss = [isinstance(x, LossOfPass) for x in values]
        self._metrics = [metric for metric, _ in step.records]
        penalties, self._passes.penalties[:] = list(self._passes.penalties), []
        return loss.value, _Outcome(
            [x.value if isinstance(x, LossOfPass) else jnp.asarray(x) for x in values],
            [added for _, added in step.records],
            after,
            penalties,
        )

    def _check(self, forward: Callable, variables: Any) -> None:
        """Raises a ValueError if several passes would give other results than one."""
        first = jax.tree.map(lambda x: x[0], self._micro)
        traced, shapes = jax.make_jaxpr(forward, return_shape=True)(variables, first)
        name = self._step.name
        if any(_jax.is_varying(x) or _jax.is_key(x) for x in traced.consts):
            raise ValueError(needs_arguments(name))
        if any(map(_jax.is_collective, traced.jaxpr.eqns)):
            refuse_passes(
                name, "its model communicates with other ranks, as a synchronized BatchNorm does"
            )
        is_rows = [
            not draws_by_row(x)
            for x, part in zip(self._leaves, first[0], strict=True)
            if part is not None
        ]
        holds_rows = [False] * len(jax.tree.leaves(variables)) + is_rows
        holds_rows += [True] * len(jax.tree.leaves(first[1]))
        holds_rows += [False] * (len(traced.jaxpr.invars) - len(holds_rows))
        found, _ = dependences(traced.jaxpr, holds_rows)
        _, outcome = jax.tree.structure(shapes).unflatten(found)
        if not all(isinstance(x, Free) for x in jax.tree.leaves(outcome.variables)):
            refuse_passes(name, "its model keeps statistics of a batch, as BatchNorm does")
        if not all(isinstance(x, Free) for x in outcome.penalties):
            refuse_passes(name, "a penalty of its loss depends on the rows")
        _, own = self._divided(list(zip(shapes[1].values, outcome.values, strict=True)))
        for x, dependence in own:
            if x.shape[:1] != (self._rows.part_rows,) or not is_by_row(dependence):
                refuse_passes(
                    name,
                    f"its loss function returns {x.dtype}{list(x.shape)}, which has no value for "
                    "each row, such as statistics of BatchNorm",
                )
