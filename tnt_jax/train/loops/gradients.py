"""Gradients of the global batch's loss, inside a distributed step."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.adapters.loops import with_varying_loops
from tnt_jax.adapters.nnx import OpenModule, is_nnx_module
from tnt_jax.distributed.sums.gradients import sum_gradients, trace_grads
from tnt_jax.train.loops.context import StepContext, SummedMetric, require_step
from tnt_jax.train.steps.kept_inputs import keep_inputs


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
        module = OpenModule(params, step.key) if is_nnx_module(params) else None
        function = _with_no_variables(loss_fn) if module is None else module.pure(loss_fn)
        function = with_varying_loops(function)
        params = params if module is None else module.params
        (value, (aux, increments, variables)), grads = _differentiate(objective, params, step)
        if module is not None:
            module.close(variables)
        for metric, added in zip(metrics, increments, strict=True):
            step.record(metric, added)
        return ((value, aux) if has_aux else value), grads

    return differentiated


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


def _differentiate(
    objective: Callable, params: Any, step: StepContext
) -> tuple[tuple[Any, Any], Any]:
    """Returns the loss of the global batch with other results, and the summed gradients."""
    rewrite = partial(keep_inputs, step=step.step) if step.platform == "cpu" else None
    (value, (loss, others)), grads, order = trace_grads(
        jax.value_and_grad(objective, has_aux=True), _jax.make_varying(params), rewrite=rewrite
    )
    is_part = loss is None
    summed = sum_gradients(
        grads, step.reduction, order=order, first=_jax.make_varying(value) if is_part else ()
    )
    return (summed.first if is_part else value, others), summed.grads


def _with_no_variables(loss_fn: Callable) -> Callable:
    return lambda *args, **kwargs: (loss_fn(*args, **kwargs), None)


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
