import numpy as np
import pytest

from tnt_jax.data.dispatch import as_source
from tnt_jax.data.layout import RankSlice, ReadOptions
from tnt_jax.data.recipes.token_batches import (
    TokenBatches,
    TokenBatchSource,
    TokenPairs,
    bucket_lengths,
)


def random_pairs(count, longest=60, seed=0):
    """Pairs whose source starts with the pair's number, so that rows can be told apart."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, (count, 2))
    sources = [
        np.array([number + 3, *[5] * (size - 1)], np.int32)
        for number, size in enumerate(lengths[:, 0])
    ]
    return TokenPairs(sources, [np.full(size, 7, np.int32) for size in lengths[:, 1]])


@pytest.mark.parametrize("ranks_per_process", [1, 2])
@pytest.mark.parametrize(("num_processes", "num_groups"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_every_pair_is_in_one_batch_of_its_bucket(num_processes, num_groups, ranks_per_process):
    pairs = random_pairs(700)
    spec = TokenBatches(pairs, tokens_per_batch=640)
    num_ranks = num_processes * ranks_per_process
    rank_slices = [
        RankSlice(num_ranks, process * ranks_per_process, ranks_per_process, num_groups=num_groups)
        for process in range(num_processes)
    ]
    sources = [TokenBatchSource(spec, rank_slice) for rank_slice in rank_slices]
    (one,) = [TokenBatchSource(spec, RankSlice(1))]
    shapes, seen, num_batches = set(), [], 0
    for step, whole in zip(
        zip(*(s.batches(3) for s in sources), strict=True), one.batches(3), strict=True
    ):
        assert len({batch.data[1].shape for batch in step}) == 1
        assert {batch.num_rows for batch in step} == {whole.num_rows}
        shapes.add(step[0].data[1].shape)
        of_first_group = sum(batch.mask.sum() for batch in step[: num_processes // num_groups])
        assert of_first_group == -(-whole.num_rows // num_groups)
        rows = [[x[batch.mask > 0] for x in batch.data[0]] for batch in step]
        for side in range(2):
            np.testing.assert_array_equal(
                np.concatenate([row[side] for row in rows]), whole.data[0][side][whole.mask > 0]
            )
        length = whole.data[1].shape[1]
        assert whole.num_rows * length <= 640
        for source, target in zip(*(x[whole.mask > 0] for x in whole.data[0]), strict=True):
            index = source[0] - 3
            np.testing.assert_array_equal(source[source > 0], pairs.sources[index])
            np.testing.assert_array_equal(target[target > 0], pairs.targets[index])
            longest = max(len(pairs.sources[index]), len(pairs.targets[index]))
            assert length == min(bucket for bucket in one.buckets if bucket >= longest)
            seen.append(index)
        num_batches += 1
    assert sorted(seen) == list(range(700))
    assert num_batches == one.num_batches
    assert len(shapes) <= len(one.buckets)


def test_epochs_differ_and_resume_at_a_batch():
    source = TokenBatchSource(TokenBatches(random_pairs(300), tokens_per_batch=512), RankSlice(2))
    first, second = ([batch.data[1] for batch in source.batches(epoch)] for epoch in range(2))
    assert any(
        a.shape != b.shape or not np.array_equal(a, b) for a, b in zip(first, second, strict=True)
    )
    for resumed, expected in zip(source.batches(1, start_batch=4), second[4:], strict=True):
        np.testing.assert_array_equal(resumed.data[1], expected)


def test_unshuffled_batches_keep_the_order_in_a_bucket():
    source = TokenBatchSource(
        TokenBatches(random_pairs(50, longest=8), 80, shuffle=False), RankSlice(1)
    )
    numbers = np.concatenate(
        [batch.data[0][0][batch.mask > 0][:, 0] for batch in source.batches(0)]
    )
    np.testing.assert_array_equal(numbers, np.arange(50) + 3)


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(5, (8,)), (9, (8, 16)), (64, (8, 16, 24, 32, 48, 64)), (70, (8, 16, 24, 32, 48, 64, 88))],
)
def test_bucket_lengths(longest, expected):
    assert bucket_lengths(longest) == expected


def test_wrong_sizes_are_explained():
    pairs = random_pairs(50)
    with pytest.raises(
        ValueError,
        match=r"gives 1 pairs of 64 tokens, fewer than the 4 ranks. Use at least 256 tokens",
    ):
        TokenBatchSource(TokenBatches(pairs, tokens_per_batch=100), RankSlice(4))
    with pytest.raises(
        ValueError, match=r"must rise and hold the longest pair \(60 tokens\), but are \[8, 16\]"
    ):
        TokenBatchSource(TokenBatches(pairs, 640, buckets=(8, 16)), RankSlice(1))
    with pytest.raises(ValueError, match="no pairs"):
        TokenBatchSource(TokenBatches(TokenPairs([], []), 640), RankSlice(1))


def test_fit_takes_token_batches():
    batches = TokenBatches(random_pairs(40, longest=16), 320)
    assert isinstance(as_source(batches, None, None, ReadOptions(RankSlice(2))), TokenBatchSource)
