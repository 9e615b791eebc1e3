import pytest
from allreduce_contenders import LAYERS, WIDTH
from project import check

from tnt_jax.launch.scale.projection import TCP_PAYLOAD_SHARE


def test_a_check_states_the_error_of_what_was_recorded():
    link = LAYERS * WIDTH**2 * 4 * 8 / 1e9 / TCP_PAYLOAD_SHARE
    seconds = {
        "step:alone": [0.1, 0.2, 0.12],
        "step:xla": [(0.12 + link) / 1.1] * 3,
        "step:link": [1.0],
    }
    rows = check(
        {"arguments": {"processes": 2, "rate_gbit": 1, "batch_size": 8}, "seconds": seconds}
    )
    assert [row["step"] for row in rows] == ["xla"]
    assert rows[0]["projected_ms"] == pytest.approx((0.12 + link) * 1e3)
    assert rows[0]["error"] == pytest.approx(0.1)
