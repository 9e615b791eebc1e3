import numpy as np
import pytest

from tnt_jax.data.layout import (
    RankSlice,
    local_rows,
    micro_batch_size,
    num_batches,
    num_padded_rows,
    resolve_batch_size,
)


def reference_rows(num_rows, num_ranks, rank):
    """Deals rows out one block after another, in plain Python."""
    size = 0
    while size * num_ranks < num_rows:
        size += 1
    rows = list(range(rank * size, (rank + 1) * size))
    return [min(row, num_rows - 1) for row in rows], [float(row < num_rows) for row in rows]


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_all_small_batches_are_dealt_out_exactly_once(num_ranks):
    for num_rows in range(1, 40):
        seen = []
        for rank in range(num_ranks):
            rows = local_rows(num_rows, RankSlice(num_ranks, rank))
            indices, mask = reference_rows(num_rows, num_ranks, rank)
            assert rows.indices.tolist() == indices
            assert rows.first_row == rank * micro_batch_size(num_rows, num_ranks)
            if rows.mask is None:
                assert all(mask)
            else:
                assert rows.mask.tolist() == mask
                assert rows.mask.dtype == np.float32
            seen += [index for index, real in zip(indices, mask, strict=True) if real]
        assert seen == list(range(num_rows))
        assert (
            num_padded_rows(num_rows, num_ranks)
            == num_ranks * micro_batch_size(num_rows, num_ranks) - num_rows
        )


@pytest.mark.parametrize("num_rows", [1, 7, 12, 13])
def test_a_process_feeds_what_its_ranks_own(num_rows):
    ranks = [local_rows(num_rows, RankSlice(6, rank)) for rank in range(6)]
    for first, size in [(0, 6), (0, 3), (3, 3), (2, 1), (1, 4)]:
        process = local_rows(num_rows, RankSlice(6, first, size))
        assert process.indices.tolist() == [
            i for rank in ranks[first : first + size] for i in rank.indices
        ]
        masks = [rank.mask for rank in ranks[first : first + size]]
        assert (process.mask is None) == (masks[0] is None)
        if process.mask is not None:
            assert process.mask.tolist() == np.concatenate(masks).tolist()


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_the_ranks_of_a_group_do_not_change_its_rows(num_groups):
    for num_rows in range(1, 30):
        dealt = []
        for per_group in (1, 2, 4):
            num_ranks = num_groups * per_group
            groups = []
            for first in range(0, num_ranks, per_group):
                whole = local_rows(
                    num_rows, RankSlice(num_ranks, first, per_group, num_groups=num_groups)
                )
                mask = np.ones(len(whole.indices)) if whole.mask is None else whole.mask
                real = whole.indices[mask > 0].tolist()
                assert not real or real[0] == whole.first_row
                groups.append(real)
            assert [row for group in groups for row in group] == list(range(num_rows))
            dealt.append(groups)
        assert dealt[0] == dealt[1] == dealt[2]
        assert len({len(group) for group in dealt[0]}) == 1 or num_rows % num_groups


def test_masks_are_present_on_all_processes_or_on_none():
    for num_ranks in range(1, 7):
        for num_rows in range(1, 30):
            present = {
                local_rows(num_rows, RankSlice(num_ranks, rank)).mask is not None
                for rank in range(num_ranks)
            }
            assert len(present) == 1


def test_number_of_batches_by_counting():
    for examples in range(1, 30):
        for size in range(1, 12):
            starts = range(0, examples, size)
            assert num_batches(examples, size) == len(starts)
            assert num_batches(examples, size, drop_remainder=True) == sum(
                start + size <= examples for start in starts
            )


@pytest.mark.parametrize(
    ("batch_size", "micro", "num_ranks", "expected"),
    [(64, None, 4, 64), (None, 16, 4, 64), (64, 16, 4, 64), (10, None, 4, 10)],
)
def test_resolve_batch_size(batch_size, micro, num_ranks, expected):
    assert resolve_batch_size(RankSlice(num_ranks), batch_size=batch_size, micro=micro) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch_size": 64, "micro": 8},
            r"\(8\) \* ranks \(4\) must equal the dataset's batch size \(64\).*batch the dataset "
            r"with 32",
        ),
        ({"batch_size": None, "micro": None}, "not batched and no tnt_micro_batch_size"),
        ({"batch_size": 3, "micro": None}, r"\(3\) must be at least the number of ranks \(4\)"),
        ({"batch_size": 0, "micro": None}, "must be at least 1, but is 0"),
        ({"batch_size": None, "micro": -1}, "tnt_micro_batch_size must be at least 1, but is -1"),
        ({"batch_size": 8, "micro": None, "num_examples": 0}, "dataset is empty"),
        (
            {"batch_size": 8, "micro": None, "num_examples": 7, "drop_remainder": True},
            "7 examples, fewer than one global batch",
        ),
    ],
)
def test_contradicting_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_batch_size(RankSlice(4), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch_size": 5, "micro": None},
            r"\(5\) must be at least the number of virtual ranks \(8\).*smaller power of two",
        ),
        (
            {"batch_size": 8, "micro": 2},
            r"tnt_micro_batch_size \(2\) \* virtual ranks \(8\) must equal .* \(8\).*batch the "
            r"dataset with 16",
        ),
    ],
)
def test_messages_speak_of_virtual_ranks_where_they_count(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_batch_size(RankSlice(8, local_ranks=8, are_virtual=True), **arguments)
