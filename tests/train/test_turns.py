"""Kinds of steps that are timed in turns, one of which others run."""

import time

import numpy as np
import pytest

from tnt_jax.train.explaining import Timed, run_to_end, turns


def test_programs_of_the_caller_are_timed_like_the_others(use_ranks):
    use_ranks(1)
    done, asked = [], []
    course = turns({"own": None, "other": done.append}, rounds=2, programs=3)
    while True:
        try:
            asked.append(next(course))
        except StopIteration as end:
            timed = end.value
            break
        time.sleep(0.01 * asked[-1])
    # Two warm up in each turn, and the first round is not timed.
    assert asked == done == [2, 3] * 3
    assert timed.seconds["own"].shape == timed.seconds["other"].shape == (2, 1)
    assert min(timed.slowest("own")) >= 0.01 > max(timed.slowest("other"))
    assert timed.compiled_s["own"].tolist() == [0, 0]
    assert timed.share("own", "other", of="own") == pytest.approx(1, abs=0.2)


def test_kinds_that_run_by_themselves_need_no_caller(use_ranks):
    use_ranks(1)
    done = []
    timed = run_to_end(turns({"one": done.append}, rounds=1, programs=4))
    assert (done, timed.seconds["one"].shape) == ([2, 4, 2, 4], (1, 1))


def test_kinds_come_first_and_last_in_turns(use_ranks):
    use_ranks(1)
    order = []
    kinds = {"a": lambda _: order.append("a"), "b": lambda _: order.append("b")}
    run_to_end(turns(kinds, rounds=2, programs=1))
    # Twice in each turn: what warms up, and what is timed.
    assert "".join(order[::2]) == "abbaab"


@pytest.mark.parametrize(("half", "is_small"), [(0.9, True), (0.76, True), (0.5, False)])
def test_batches_are_small_where_half_the_rows_take_nearly_as_long(use_ranks, half, is_small):
    use_ranks(1)
    whole = np.full((3, 1), 0.01)
    assert Timed({"no sums": whole, "half the rows": half * whole}, {}).is_of_small_batches() == (
        is_small
    )
    assert not Timed({"no sums": whole}, {}).is_of_small_batches()
