"""What a job that waits for room says."""

import pytest

from tnt_jax.on_ray.broker import describe_lack

CPU, GPU = {"CPU": 1}, {"CPU": 1, "GPU": 1}


@pytest.mark.parametrize(
    ("bundle", "room", "count", "fewest", "text"),
    [
        (CPU, 4, 99, 99, "room for 99 processes, each with 1 CPU; there is room for 4"),
        (GPU, 0, 8, 4, "room for 4 processes, each with 1 CPU and 1 GPU; there is room for 0"),
        (CPU, 0, 2, 1, "room for one process with 1 CPU; there is room for 0"),
        (
            CPU, 1, 2, 1,
            "room for 2 processes, each with 1 CPU; there is room for 1, which is used after 10 "
            "seconds if no more comes",
        ),
        (
            CPU, 2, 2, 1,
            "Ray to place 2 processes, each with 1 CPU; there is room for 2, but a node that is "
            "lost counts until Ray notices",
        ),
    ],
)  # fmt: skip
def test_a_job_says_for_what_room_it_waits(bundle, room, count, fewest, text):
    assert describe_lack(bundle, room, count, fewest) == text
