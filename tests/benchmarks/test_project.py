import pytest
from allreduce_contenders import LAYERS, WIDTH
from project import TCP_PAYLOAD_SHARE, Links, all_reduce_ms, check, project

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


def test_a_check_states_the_error_of_what_was_recorded():
    link = LAYERS * WIDTH**2 * 4 * 8 / 1e9 / TCP_PAYLOAD_SHARE
    seconds = {
        "step:alone": [0.1, 0.2, 0.12],
        "step:xla": [(0.12 + link) / 1.1] * 3,
        "step:ring deferred": [1.0],
    }
    rows = check(
        {"arguments": {"processes": 2, "rate_gbit": 1, "batch_size": 8}, "seconds": seconds}
    )
    assert [row["step"] for row in rows] == ["xla"]
    assert rows[0]["projected_ms"] == pytest.approx((0.12 + link) * 1e3)
    assert rows[0]["error"] == pytest.approx(0.1)
