import random

import pytest

from tnt_jax.parameter_server.server_group import StalenessBound, Statistics


@pytest.mark.parametrize("bound", [0, 1, 2, 5, None])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_no_gradient_is_staler_than_the_bound_and_nobody_waits_for_ever(bound, num_workers):
    rule, rng = StalenessBound(bound), random.Random(0)
    version, applied, largest = 0, 0, 0
    computing, ready = [], []
    for _ in range(3000):
        under_way = computing + ready
        free = num_workers - len(computing)
        if free and rng.random() < 0.7 and rule.may_start(version, under_way):
            computing.append(version)
        elif computing and rng.random() < 0.7:
            # One worker is slow: the first seldom ends.
            index = rng.randrange(len(computing)) if rng.random() < 0.3 else -1
            ready.append(computing.pop(index))
        for start in sorted(ready):
            others = list(computing + ready)
            others.remove(start)
            if not rule.may_apply(version, others):
                break
            ready.remove(start)
            largest = max(largest, version - start)
            assert bound is None or version - start <= bound
            version, applied = version + 1, applied + 1
    assert applied > 300
    assert bound is None or largest == min(bound, largest)


def test_the_oldest_gradient_may_always_be_applied():
    rule = StalenessBound(2)
    assert not rule.may_apply(3, [1, 2])  # The one of version 1 would be 3 updates late.
    assert rule.may_apply(3, [2, 3])
    assert not rule.may_start(0, [0, 0, 0])
    assert rule.may_start(0, [0, 0])


def test_summary_names_rates_and_staleness():
    statistics = Statistics(updates=4, examples=80, training_s=2.0)
    statistics.staleness.update([0, 0, 2, 2])
    statistics.examples_by_worker.update({0: 60, 1: 20})
    statistics.busy_s.update({0: 2, 1: 2})
    assert statistics.mean_staleness == 1
    assert statistics.summary() == (
        "version 4, 40 examples/s, 2.0 updates/s; gradients by staleness {0: 2, 2: 2}; examples/s "
        "of workers while busy {0: 30, 1: 10}; 0 dropped, 0 done again, 0 updates lost"
    )
    assert Statistics().examples_per_s == Statistics().updates_per_s == 0
