"""The picture of a batch's journey shows what the library does."""

import journey
import numpy as np

import tnt_jax as tnt


def test_the_rows_of_the_picture_are_those_of_the_ranks(use_ranks):
    use_ranks(journey.RANKS)
    rows = np.arange(journey.ROWS)
    (batch,) = tnt.distribute(rows, batch_size=journey.ROWS, shuffle=False)
    shards = sorted(batch.inputs.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    masks = sorted(batch.mask.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    shown = [journey.rows_of(rank) for rank in range(journey.RANKS)]
    for row_shard, mask_shard, drawn in zip(shards, masks, shown, strict=True):
        mask = np.asarray(mask_shard.data) > 0
        assert mask.tolist() == [row is not None for row in drawn]
        real = [row for row in drawn if row is not None]
        assert np.asarray(row_shard.data)[mask].tolist() == real


def test_the_file_is_what_the_script_draws():
    assert journey.FILE.read_text() == journey.picture()
