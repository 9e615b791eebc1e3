"""The model of a step on many ranks against sums worked out by hand, and its fit to measurements."""

import pytest

from tnt_jax.launch.scale.projection import (
    Links,
    Measured,
    Model,
    Outer,
    all_reduce_ms,
    fit,
    project,
    why_not_projected,
)

ETHERNET = Links(
    gpus_per_host=1, gpu_gbytes=1, host_gbytes=0.125, gpu_latency_us=0, host_latency_us=0
)


def test_a_sum_sends_each_byte_twice_less_the_own_part():
    assert all_reduce_ms(28, 2, ETHERNET) == pytest.approx(28 / 0.125)
    assert all_reduce_ms(28, 4, ETHERNET) == pytest.approx(1.5 * 28 / 0.125)
    # Two hosts of two GPUs: all bytes once within the hosts, and once between them.
    assert all_reduce_ms(28, 4, ETHERNET._replace(gpus_per_host=2)) == pytest.approx(
        28 / 1 + 28 / 0.125
    )


# Two buckets of a step of 90 ms are ready at 60 and 90 ms, the forward pass being a third of it.
@pytest.mark.parametrize(
    ("mb", "overlap", "expected"),
    [(1, False, 90 + 2 * 8), (1, True, 90 + 8), (10, True, 60 + 2 * 80), (10, False, 90 + 2 * 80)],
)
def test_buckets_travel_once_they_are_ready_and_the_one_before_is_done(mb, overlap, expected):
    assert project(90, [mb, mb], 2, ETHERNET, overlap=overlap) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("delay", "expected"),
    # 3 * 5 MB in two fragments travel for 60 ms each; steps of 10 ms hide 10 ms for each of delay.
    [(0, 10 + 60 * 2 / 8), (2, 10 + 40 * 2 / 8), (6, 10), (7, 10)],
)
def test_outer_updates_cost_what_steps_do_not_hide(delay, expected):
    outer = Outer(ranks=1, every=8, fragments=2, delay=delay, mb=5)
    model = Model((28.0,), ETHERNET, False, outer)
    assert model.step_ms(4, 10) == pytest.approx(expected)
    assert model.host_mb(4) == pytest.approx(3 * 5 / 8)
    assert model.step_ms(1, 10) == 10
    # Without groups, all ranks sum gradients in a ring.
    assert Model((28.0,), ETHERNET, False).host_mb(4) == pytest.approx(1.5 * 28)


def test_ranks_of_a_group_sum_gradients_and_groups_of_a_host_share_its_link():
    hosts_of_four = ETHERNET._replace(gpus_per_host=4)
    outer = Outer(ranks=2, every=8, fragments=1, delay=0, mb=5)
    model = Model((28.0,), hosts_of_four, False, outer)
    # Two groups of each of two hosts send to the two groups of the other one.
    assert outer.host_mb(8, 4) == 2 * 2 * 5
    assert model.step_ms(8, 10) == pytest.approx(10 + 28 / 1 + 20 / 0.125 / 8)


def measured_by(model, numbers, *, local_ms, per_host=1):
    return [
        Measured(ranks, -(-ranks // per_host), model.step_ms(ranks, local_ms), local_ms)
        for ranks in numbers
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_fit_finds_the_rate_that_steps_were_made_with(overlap):
    made = Model((10.0, 10.0), ETHERNET, overlap)
    found = fit(measured_by(made, (1, 2, 4), local_ms=90), [10.0, 10.0], gpus_per_host=1)
    assert found.links.host_gbytes == pytest.approx(0.125, rel=0.02)
    assert found.overlap == overlap
    assert found.step_ms(64, 90) == pytest.approx(made.step_ms(64, 90), rel=0.03)


def test_links_within_and_between_hosts_are_found_apart():
    made = Model((28.0,), Links(4, 10, 0.5, 0, 0), False)
    found = fit(measured_by(made, (1, 4, 8, 16), local_ms=50, per_host=4), [28.0], gpus_per_host=4)
    assert found.links.gpu_gbytes == pytest.approx(10, rel=0.03)
    assert found.links.host_gbytes == pytest.approx(0.5, rel=0.03)


def test_a_given_rate_is_taken_as_it_is_less_the_headers():
    found = fit([Measured(2, 2, 400, 100)], [28.0], gpus_per_host=1, link_gbit=1)
    assert found.links.host_gbytes == pytest.approx(0.125 * 1448 / 1514)


@pytest.mark.parametrize(
    ("hosts", "link_gbit", "reason"),
    [
        ({1: 1, 2: 2, 4: 4}, None, ""),
        ({1: 1, 2: 2}, None, "at least two numbers of ranks on several hosts"),
        ({1: 1, 2: 1, 4: 1}, None, "at least two numbers of ranks on several hosts"),
        ({1: 1, 2: 2}, 1.0, ""),
        ({1: 1, 2: 1}, 1.0, "a number of ranks on several hosts must be measured"),
    ],
)
def test_an_error_needs_a_number_of_ranks_that_was_not_fitted(hosts, link_gbit, reason):
    assert why_not_projected(hosts, link_gbit=link_gbit).startswith(
        reason if not reason or link_gbit is None else "with --link-gbit"
    )
