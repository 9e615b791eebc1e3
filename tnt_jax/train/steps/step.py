"""One training, evaluation or prediction step: a jitted `shard_map` over the axis `data`.

A step is built once from pure functions (`Parts`) and compiled once for each shape of a batch.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.sums.random_rows import batch_key, evaluation_key
from tnt_jax.distributed.sums.reduction import (
    Reduction,
    StateAverage,
    psum,
    sum_gradients,
    trace_grads,
)
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.train.contracts import Apply, Batch, Parts, TrainingStep
from tnt_jax.train.finite import can_be_summed, is_finite_step, loss_scale, take_or_leave
from tnt_jax.train.state import TrainState, state_arrays, updated
from tnt_jax.train.steps.epoch_sums import (
    add_sums,
    counts_of,
    divide,
    num_local_rows,
    num_real_rows,
    quotient,
    weighted_sum,
)
from tnt_jax.train.steps.micro_batches import in_passes, sums_of_passes


def accumulate(
    state: TrainState,
    grads: Any,
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    num_steps: int,
) -> tuple[Any, Any, Any]:
    """Adds a step's gradients to the sums and updates in every `num_steps`-th step, as Keras does.

    It runs inside `shard_map`, where the gradients and `state.accumulated` (`[1, ...]`, or None if
    every step updates) are this rank's. `update` maps mean gradients, parameters and optimizer
    state to the updated parameters and optimizer state, and sums the gradients over the ranks
    unless they are summed already. Returns parameters, optimizer state and sums after the step.
    """
    if num_steps == 1:
        return *update(grads, state.params, state.opt_state), None
    totals = with_step(state.accumulated, grads)

    def update_by_mean(totals: Any) -> tuple[Any, Any, Any]:
        means = jax.tree.map(lambda total: total[0] / num_steps, totals)
        params, opt_state = update(means, state.params, state.opt_state)
        return params, opt_state, _jax.zeros_like(totals)

    def go_on(totals: Any) -> tuple[Any, Any, Any]:
        return state.params, state.opt_state, totals

    # The step number is the same on all ranks, so either all of them exchange gradients or none.
    return jax.lax.cond((state.step + 1) % num_steps == 0, update_by_mean, go_on, totals)


def with_step(accumulated: Any, grads: Any) -> Any:
    """Returns a rank's accumulated gradients `[1, ...]` with those of a further step."""
    return jax.tree.map(lambda total, grad: total + grad[None], accumulated, grads)


# Fewer rows make poor statistics (Wu and He 2018, arXiv:1803.08494, figure 1).
_FEW_ROWS = 16
# Parts of steps that have been traced.
_traced = Slot[WeakSet[Parts]](WeakSet)
_own_statistics = Slot[list[str]](list)
# How arrays come to `shard_map` and leave it; the batches of several steps are stacked.
REPLICATED: Any = PartitionSpec()
BY_ROW: Any = PartitionSpec(_jax.DATA_AXIS)
STACKED: Any = PartitionSpec(None, _jax.DATA_AXIS)
# Everything is replicated except what each rank keeps of its own gradients.
_STATE = TrainState(*[REPLICATED] * 5, accumulated=BY_ROW, residual=BY_ROW, first_row=REPLICATED)


def sums_every_step() -> bool:
    """Returns whether ranks sum even those gradients that are accumulated first."""
    return link() is not None  # In an elastic job the part of a rank would be lost with it.


def donated() -> tuple[int, ...]:
    """Returns the positions of donated arguments of a step: the state, but in an elastic job."""
    return (0,) if link() is None else ()  # There a step that fails is done again.


def repeated(step: Callable) -> Callable:
    """Returns the function `(state, sums, batches) -> (state, sums)` that scans a step."""

    # Its name is that of the program, for the profiler and the messages of JAX.
    def steps(state: Any, sums: Any, batches: Any) -> Any:
        return jax.lax.scan(
            lambda carry, batch: (step(*carry, batch), None), (state, sums), batches
        )[0]

    return steps


def compiled(function: Callable, mesh: Mesh, **options: Any) -> Callable:
    """Returns a jitted function with the compiler options that suit the devices of a mesh."""
    return jax.jit(function, compiler_options=_jax.convolution_options(mesh), **options)


class LocalStep(NamedTuple):
    """Results of one rank in a step before it communicates."""

    numbers: Any  # Loss, loss of each term, and increments of the metrics.
    model_state: Any  # After the pass.
    grads: Any  # This rank's part; of the scaled loss if the optimizer scales it.
    order: list[int]  # Of the leaves of `grads`, in order of availability, earliest first.


def differentiate(
    parts: Parts, state: TrainState, batch: Batch, mesh: Mesh, *, first_rank: jax.Array | int = 0
) -> LocalStep:
    """Returns the loss, metrics and gradients of this rank's rows, inside `shard_map`.

    `first_rank` are the ranks of other meshes that compute earlier rows of the global batch.
    """
    num_rows = num_local_rows(batch)
    key = batch_key(
        state.key, state.step, num_rows, first_rank=first_rank, rows_before=state.first_row
    )
    scale = loss_scale(state.opt_state)
    rows = in_passes(num_rows, parts.rows_at_once)
    num_shares = _jax.num_ranks(mesh) * rows.num_parts

    def one_pass(batch: Batch, key: Any, counts: list[Any] | None) -> Any:
        def objective(params: Any) -> tuple[jax.Array, tuple[Any, Any]]:
            measured = parts.measure(params, state.model_state, batch, key=key, train=True)
            divisors = counts_of(measured) if counts is None else counts
            losses = [quotient(*pair) for pair in zip(measured.terms, divisors, strict=True)]
            total = weighted_sum(losses, measured.terms, measured.penalty / num_shares)
            loss = _jax.make_varying(jnp.asarray(total, jnp.float32))
            scaled = loss if scale is None else loss * scale
            return scaled, (
                _jax.make_varying((loss, losses, measured.increments)),
                measured.model_state,
            )

        is_cpu = mesh.devices.flat[0].platform == "cpu"
        return trace_grads(
            jax.value_and_grad(objective, has_aux=True),
            _jax.make_varying(state.params),
            rewrite=partial(for_cpus, step=state.step) if is_cpu else None,
        )

    if rows.num_parts == 1:
        (_, (numbers, model_state)), grads, order = one_pass(batch, key, None)
    else:
        # The compiler leaves nothing of the forward pass: `why_in_one_pass` has seen to it.
        whole = parts.measure(state.params, state.model_state, batch, key=key, train=True)
        counts, model_state = counts_of(whole), whole.model_state

        def numbers_and_grads(micro_batch: tuple[Batch, Any]) -> tuple[Any, None]:
            batch, words = micro_batch
            (_, (numbers, _)), grads, _ = one_pass(batch, rows.key(key, words), counts)
            return (numbers, grads), None

        micro_batches = (rows.cut_batch(batch), rows.keys(key))
        (numbers, grads), _ = sums_of_passes(numbers_and_grads, micro_batches)
        order = list(range(len(jax.tree.leaves(grads))))
    # Later traces are those of last batches, which may well be small.
    if parts not in _traced.get():
        _traced.get().add(parts)
        _warn_of_statistics(model_state, num_rows)
    return LocalStep(numbers, model_state, grads, order)


def make_train_step(
    training: TrainingStep, mesh: Mesh, *, reduction: Reduction, stacked: bool = False
) -> Callable:
    """Returns the jitted function `(state, sums, batch) -> (state, sums)`; see `Steps.train`.

    `state` is donated; `sums` is not, so that the sums of any step can be read later. If gradients
    are accumulated, each rank sums its own, and ranks exchange them only in the step that updates,
    unless `sums_every_step`. If `stacked`, it is one program of several steps, for arrays `[steps,
    rows, ...]`.
    """
    parts, optimizer, accumulation_steps, on_nan = training
    at_once = accumulation_steps == 1 or sums_every_step()
    states = replace(_STATE, accumulated=REPLICATED) if at_once else _STATE

    def step(state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        local = differentiate(parts, state, batch, mesh)
        rows = num_real_rows(batch)
        # A group of local steps may have no row of a batch, whose statistics are not finite.
        has_rows = None if state.first_row is None or batch.mask is None else rows > 0
        if has_rows is not None:
            grads = jax.tree.map(lambda x: jnp.where(has_rows, x, 0), local.grads)
            local = local._replace(grads=grads)
        average = StateAverage(local.model_state, share_of_rows(batch, rows))
        total_of = partial(sum_gradients, reduction=reduction, order=local.order)
        grads, unfit = None, 0
        if at_once:
            summed = total_of(
                local.grads, first=local.numbers, others=average.summands, residual=state.residual
            )
            numbers, totals, grads = summed.first, summed.others, summed.grads
            if accumulation_steps > 1:
                grads = with_step(state.accumulated, grads)

            def update_state() -> tuple[Any, Any, Any]:
                params, opt_state, accumulated = accumulate(
                    state, summed.grads, partial(updated, optimizer), accumulation_steps
                )
                return params, (opt_state, summed.residual), accumulated
        else:
            numbers, unfit = sums_of_numbers(
                local, state, mesh, checked=on_nan and with_step(state.accumulated, local.grads)
            )
            totals = psum(average.summands)

            def reduce_and_update(means: Any, params: Any, carried: Any) -> tuple[Any, Any]:
                opt_state, residual = carried
                summed = total_of(means, residual=residual)
                params, opt_state = updated(optimizer, summed.grads, params, opt_state)
                return params, (opt_state, summed.residual)

            def update_state() -> tuple[Any, Any, Any]:
                before = replace(state, opt_state=(state.opt_state, state.residual))
                return accumulate(before, local.grads, reduce_and_update, accumulation_steps)

        model_state = average.result(totals)
        if has_rows is not None:

            def unless_empty(new: jax.Array, old: jax.Array) -> jax.Array:
                is_floating = jnp.issubdtype(new.dtype, jnp.floating)
                return jnp.where(has_rows, new, old) if is_floating else new

            model_state = jax.tree.map(unless_empty, model_state, state.model_state)
        loss, losses, increments = numbers

        def finish() -> tuple[TrainState, Any]:
            params, (opt_state, residual), accumulated = update_state()
            new_state = state.after_step(
                params, opt_state, accumulated, model_state=model_state, residual=residual
            )
            return new_state, add_sums(sums, loss, losses, increments, rows)

        def judge() -> jax.Array:
            return is_finite_step(state, model_state, loss, grads, found=jnp.equal(unfit, 0))

        platform = mesh.devices.flat[0].platform
        return take_or_leave(on_nan, judge, (state, sums), finish, loss=loss, platform=platform)

    mapped = _jax.shard_map(
        repeated(step) if stacked else step,
        mesh=mesh,
        in_specs=(states, REPLICATED, STACKED if stacked else BY_ROW),
        out_specs=(states, REPLICATED),
    )
    return compiled(mapped, mesh, donate_argnums=donated())


def sums_of_numbers(
    local: LocalStep, state: TrainState, mesh: Mesh, *, checked: Any
) -> tuple[Any, Any]:
    """Returns the sums of a step's numbers over the ranks, and how many ranks' `checked` is unfit.

    These are gradients of this rank that are not summed on all ranks; None checks nothing.
    """
    if checked is None:
        return psum(local.numbers), 0
    unfit = ~can_be_summed(state, checked, _jax.num_ranks(mesh))
    loss, *others = local.numbers
    # In one array with the loss: a sum of its own would be one more collective.
    pair, *others = psum((_jax.make_varying(jnp.stack([loss, unfit])), *others))
    return (pair[0], *others), pair[1]


def make_eval_step(parts: Parts, mesh: Mesh) -> Callable:
    """Returns the jitted function `(params, model_state, sums, batch) -> sums`."""
    specs = (REPLICATED, REPLICATED, REPLICATED, BY_ROW)
    step = evaluation(parts, mesh)
    return compiled(_jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=REPLICATED), mesh)


def evaluation(parts: Parts, mesh: Mesh) -> Callable:
    """Returns one rank's step `(params, model_state, sums, batch) -> sums`, for `shard_map`."""

    def step(params: Any, model_state: Any, sums: Any, batch: Batch) -> Any:
        key = evaluation_key(sums["loss"][1], num_local_rows(batch))
        measured = parts.measure(params, model_state, batch, key=key, train=False)
        losses = [divide(term) for term in measured.terms]
        local_loss = weighted_sum(
            losses, measured.terms, jnp.float32(measured.penalty) / _jax.num_ranks(mesh)
        )
        numbers = _jax.make_varying((local_loss, losses, measured.increments))
        loss, losses, increments = psum(numbers)
        return add_sums(sums, loss, losses, increments, num_real_rows(batch))

    return step


def make_predict_step(apply: Apply, mesh: Mesh) -> Callable:
    """Returns the jitted function that `Steps.predict` describes."""
    specs = (REPLICATED, REPLICATED, BY_ROW, REPLICATED)
    step = prediction(apply)
    return compiled(_jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=BY_ROW), mesh)


def prediction(apply: Apply) -> Callable:
    """Returns a rank's `(params, model_state, inputs, first_row) -> outputs`, for `shard_map`."""

    def step(params: Any, model_state: Any, inputs: Any, first_row: Any) -> Any:
        key = evaluation_key(first_row, jax.tree.leaves(inputs)[0].shape[0])
        applied = apply(params, model_state, inputs, key=key, train=False, mask=None)
        _require_rows(applied.outputs)
        return _jax.make_varying(applied.outputs)

    return step


def _require_rows(outputs: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(outputs):
        if jnp.ndim(x) == 0:
            raise ValueError(
                "Outputs of the model must have a row for each row of the inputs, [rows, ...], but "
                f"the output{jax.tree_util.keystr(path)} is a scalar. Leave it out; what the model "
                "adds to the loss is sown (docs/flax.md) or passed to add_loss."
            )


def own_statistics() -> list[str]:
    """Returns by path which arrays of the state steps of this job compute of a rank's own rows."""
    return list(_own_statistics.get())


def _warn_of_statistics(model_state: Any, num_rows: int) -> None:
    """Warns if statistics of each rank's own rows make results depend on the number of ranks."""
    arrays = state_arrays({"model_state": model_state})
    own = [path for path, x in arrays.items() if _jax.is_varying(x)]
    _own_statistics.get().extend(own)
    if own:
        logger.warning(
            "Statistics such as BatchNorm's are computed over each rank's %d row(s) of a batch, so "
            "results depend on the number of ranks%s. Synchronize them: "
            "BatchNorm(axis_name='data') in Flax, synchronized=True in Keras.",
            num_rows,
            f"; below {_FEW_ROWS} rows they are also inaccurate" if num_rows < _FEW_ROWS else "",
        )


def share_of_rows(batch: Batch, rows: jax.Array | float) -> jax.Array | None:
    """Returns this rank's share of the real rows of a global batch; None if all have as many."""
    return None if batch.mask is None else jnp.sum(batch.mask) / rows


def for_cpus(traced: Any, step: jax.Array) -> Any:
    """Returns a program with the results of `traced` that XLA's CPU compiler makes fast."""
    if not _jax.convolutions_in(traced.jaxpr):
        return traced
    return _jax.with_features_last(keep_inputs(traced, step))


# The gradient of a kernel is a convolution of the transposed input. XLA fuses that transposition
# with the computation of the input, in a residual network a chain of blocks. It thus runs the chain
# again for each kernel, in the order of the transposed array; barriers do not prevent this. But XLA
# never computes an operation twice that it considers expensive, such as a division. So inputs are
# divided by a number that is 1, which the compiler cannot know, and both convolutions use the
# quotient: x / 1 is x.
def keep_inputs(traced: Any, step: jax.Array) -> Any:
    """Returns a program with the results of `traced` that keeps the inputs of convolutions.

    Convolutions inside loops, conditions and called functions do not change. `step` must be an
    argument of the compiled program, because a constant would be simplified away.
    """
    shared = _shared_inputs(traced.jaxpr)
    if not shared:
        return traced
    one = jnp.where(step < 0, jnp.float32(2), jnp.float32(1))
    divisor = _jax.new_variable(one)
    quotients = {}
    equations = []
    for equation in traced.jaxpr.eqns:
        if _is_convolution(equation) and equation.invars[0] in shared:
            x = equation.invars[0]
            if x not in quotients:
                division, quotients[x] = _jax.equations_on(_divide, x, divisor)
                equations += division
            equation = equation.replace(invars=[quotients[x], *equation.invars[1:]])
        equations.append(equation)
    jaxpr = traced.jaxpr.replace(constvars=[*traced.jaxpr.constvars, divisor], eqns=equations)
    return _jax.ClosedJaxpr(jaxpr, [*traced.consts, one])


def _shared_inputs(jaxpr: Any) -> set[Any]:
    """Returns computed inputs that convolutions take with batch and features in both orders."""
    made = {variable for equation in jaxpr.eqns for variable in equation.outvars}
    orders: dict[Any, set[tuple[int, int]]] = {}
    for equation in filter(_is_convolution, jaxpr.eqns):
        if equation.invars[0] in made:
            batch, features = equation.params["dimension_numbers"].lhs_spec[:2]
            orders.setdefault(equation.invars[0], set()).add((batch, features))
    return {
        x
        for x, found in orders.items()
        if any((features, batch) in found for batch, features in found)
    }


def _divide(x: jax.Array, one: jax.Array) -> jax.Array:
    # The barrier is removed late enough that the compiler does not multiply by 1 / one instead.
    return lax.div(x, lax.optimization_barrier(lax.broadcast(one.astype(x.dtype), x.shape)))


def _is_convolution(equation: Any) -> bool:
    return equation.primitive.name == "conv_general_dilated" and isinstance(
        equation.invars[0], _jax.Var
    )
