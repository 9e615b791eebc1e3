"""Predictions for data that each process brings for itself."""

import threading

import numpy as np
import pytest
from boards import Boards
from processes import SCRIPTS, launch

from tnt_jax.data.layout import RankSlice
from tnt_jax.data.shards import ShardSource
from tnt_jax.train.execution import DeviceBatches

SIZES = [3, 9, 1, 5]


def expected(num_processes):
    return np.concatenate(
        [np.arange(size) + 100.0 * process for process, size in enumerate(SIZES[:num_processes])]
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "num_processes",
    [
        pytest.param(2, marks=pytest.mark.long),
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.long),
    ],
)
def test_predictions_of_unequal_shards_are_their_rows_shard_after_shard(num_processes, tmp_path):
    result = launch(num_processes, SCRIPTS / "predict_shards.py", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for process in range(num_processes):
        saved = dict(np.load(tmp_path / f"{process}.npz"))
        np.testing.assert_allclose(
            saved.pop("loss"), np.mean(expected(num_processes) ** 2), rtol=1e-5
        )
        assert len(saved) == 3
        for name, predicted in saved.items():
            np.testing.assert_array_equal(predicted[:, 0], expected(num_processes), err_msg=name)


@pytest.mark.parametrize("local_ranks", [[1, 1], [2, 1, 3], [2, 2, 2, 2]])
def test_real_rows_of_every_step_are_those_that_the_mask_tells(local_ranks):
    """Puts the rows of simulated processes together as the devices do."""
    boards, firsts = Boards(len(local_ranks)), np.cumsum([0, *local_ranks])
    steps = [None] * len(local_ranks)

    def read(process):
        data = [np.arange(SIZES[process]) + 100 * process]
        batches = [x[i : i + 2] for x in data for i in range(0, len(x), 2)]
        rank_slice = RankSlice(int(firsts[-1]), int(firsts[process]), local_ranks[process])
        steps[process] = list(
            ShardSource(batches, rank_slice=rank_slice, board=boards.of(process)).batches(0)
        )

    threads = [
        threading.Thread(target=read, args=(process,)) for process in range(len(local_ranks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for step in zip(*steps, strict=True):
        rows = np.concatenate([part.data for part in step])
        masks = [np.ones(len(part.data)) if part.mask is None else part.mask for part in step]
        assert len({str(part.shards) for part in step}) == 1
        group = DeviceBatches(rows, step[0].num_rows, shards=step[0].shards)
        for process, real in enumerate(group.real_rows):
            np.testing.assert_array_equal(rows[real], step[process].data[masks[process] > 0])
