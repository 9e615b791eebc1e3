"""Shares of traced steps: by hand, and of a real trace."""

import jax
import jax.numpy as jnp
import pytest

from tnt_jax import _jax
from tnt_jax.train.timing.timed_steps import DATA, STEPS, Event, events_of, shares_of


def operation(name, start, end):
    return Event(name, start, end, True)


def annotation(name, start, end):
    return Event(name, start, end, False)


def test_a_moment_counts_once():
    events = [
        annotation(STEPS, 100, 200),
        operation("dot.3", 90, 120),  # Half of it before the steps.
        operation("fusion", 110, 140),  # Beside another.
        operation("all-reduce.1", 130, 160),  # 20 of it while nothing computes.
        annotation(DATA, 150, 170),  # 10 of it while nothing is exchanged.
        operation("while.2", 100, 200),  # Holds others.
        operation("dot.4", 300, 400),
    ]
    assert shares_of(events) == pytest.approx((0.4, 0.2, 0.1, 0.3))


@pytest.mark.parametrize(
    "name",
    ["all-reduce.7", "reduce-scatter", "all-gather-start.1", "collective-permute-done", "send.1",
     "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
     "psum.14"],
)  # fmt: skip
def test_operations_between_ranks_are_exchange(name):
    assert shares_of([annotation(STEPS, 0, 10), operation(name, 0, 5)])[1] == 0.5


@pytest.mark.parametrize("name", ["reduce.1", "ynn_fusion", "sender_fusion", "call_fusion"])
def test_other_operations_are_computation(name):
    assert shares_of([annotation(STEPS, 0, 10), operation(name, 0, 5)])[0] == 0.5


def test_a_trace_without_operations_or_steps_is_refused():
    with pytest.raises(ValueError, match="no operation of a device"):
        shares_of([annotation(STEPS, 0, 10)])
    with pytest.raises(ValueError, match="must have one 'tnt_jax steps', but has 0"):
        shares_of([operation("dot", 0, 10)])


def test_a_real_trace_has_the_operations_of_the_steps():
    x = jnp.ones((400, 400))
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    jax.block_until_ready(step(x))
    with _jax.profile() as recording, jax.profiler.TraceAnnotation(STEPS):
        with jax.profiler.TraceAnnotation(DATA):
            sum(range(100_000))
        for _ in range(3):
            jax.block_until_ready(step(x))
    events = events_of(recording)
    compute, exchange, data, host = shares_of(events)
    assert sum(event.is_operation for event in events) >= 3
    assert compute > 0
    assert exchange == 0
    assert data > 0
    assert compute + data + host == pytest.approx(1)
