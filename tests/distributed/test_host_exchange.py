"""Host values put together from the bytes of several processes, against NumPy."""

import threading

import jax
import numpy as np
import pytest

from tnt_jax.distributed.host import exchange
from tnt_jax.distributed.host.exchange import (
    Gathered,
    are_small,
    collected,
    exclusive,
    gather,
    raise_first,
    reduced,
    sent_from,
    typed,
)

DTYPES = (np.float64, np.int8, np.bool_, np.complex64)


def as_gathered(*trees, present=None):
    """Returns what the first of several processes has gathered, each a list of arrays."""
    present = list(range(len(trees))) if present is None else present
    trees = [trees[position] for position in present]
    data = [b"".join(leaf.tobytes() for leaf in leaves) for leaves in trees]
    shapes = [[leaf.shape for leaf in leaves] for leaves in trees]
    members = tuple(range(max(present) + 1))
    structure = jax.tree.structure(trees[0])
    return Gathered(trees[0], structure, members, present, shapes, max(map(len, data)), data)


def trees(num_processes, *, is_ragged=False):
    rng = np.random.default_rng(num_processes)
    return [
        [
            (rng.normal(size=(2 + is_ragged * process, 3)) * 5).astype(dtype)
            for dtype in DTYPES
        ]
        for process in range(num_processes)
    ]  # fmt: skip


@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_arrays_of_all_processes_are_reduced_element_by_element(num_processes):
    numbers = [leaves[:2] for leaves in trees(num_processes)]
    sums = reduced(as_gathered(*numbers), lambda stacked: stacked.sum(axis=0, dtype=stacked.dtype))
    expected = [sum(leaves[1:], leaves[0]) for leaves in zip(*numbers, strict=True)]
    assert [total.tolist() for total in sums] == [total.tolist() for total in expected]
    assert [total.dtype for total in sums] == [leaf.dtype for leaf in numbers[0]]


def test_rows_of_different_numbers_are_concatenated():
    pieces = trees(3, is_ragged=True)
    whole = [np.concatenate(leaves) for leaves in zip(*pieces, strict=True)]
    gathered = collected(as_gathered(*pieces))
    assert [
        np.array_equal(typed(data, leaf.dtype, leaf.shape), leaf)
        for data, leaf in zip(gathered, whole, strict=True)
    ] == [True] * len(DTYPES)


def test_only_the_bytes_that_are_asked_for_are_collected():
    first, second = np.arange(4, dtype=np.int32), np.arange(10, 14, dtype=np.int32)
    data = collected(as_gathered([first], [second]), lambda process, index: (4, 12 - 4 * process))
    assert data[0].view(np.int32).tolist() == [1, 2, 11]


def test_a_root_is_a_process_though_others_are_absent():
    sent = as_gathered(*trees(3), present=[0, 1, 2])
    assert [leaf.tolist() for leaf in sent_from(sent, 2)] == [leaf.tolist() for leaf in trees(3)[2]]


def test_arrays_without_elements_keep_their_dtype():
    empty = [np.empty((0, 3), np.int16)]
    (total,) = reduced(
        as_gathered(empty, empty), lambda stacked: stacked.sum(axis=0, dtype=np.int16)
    )
    assert (total.dtype, total.shape) == (np.int16, (0, 3))
    assert typed(np.empty(0, np.uint8), np.dtype("f8"), (0, 2)).shape == (0, 2)


def test_one_process_brings_its_values_to_itself():
    tree = {"a": np.arange(3), "b": [np.float64(1 / 3)]}
    alone = gather("gather", tree, (0,))
    assert alone.own == 0
    assert [leaf.tolist() for leaf in sent_from(alone, 0)] == [[0, 1, 2], 1 / 3]
    assert alone.nbytes(0) == [24, 8]


def test_an_array_that_cannot_be_used_is_named():
    def refuse(path, leaf):
        raise ValueError(f"{path} is {leaf.dtype}")

    with pytest.raises(ValueError, match=r"\['a'\].* is int8"):
        gather("gather", {"a": np.int8([1])}, (0,), refuse)
    with pytest.raises(KeyError, match="of this process"):
        gather("gather", {}, (0,), problem=KeyError("of this process"))


def test_the_own_error_comes_before_those_of_others():
    with pytest.raises(KeyError, match="mine"):
        raise_first(KeyError("mine"), ["ValueError: theirs", ""])
    with pytest.raises(RuntimeError, match="Process 7 failed: ValueError: theirs"):
        raise_first(None, ["", "ValueError: theirs"], members=(3, 7))
    assert raise_first(None, ["", ""]) is None


@pytest.mark.parametrize(("values", "small"), [(["", "YQ=="], True), (["", None], False)])
def test_values_are_small_if_all_came_along(values, small):
    assert are_small([{"joined": 3}, *({"values": value} for value in values)]) == small


def test_two_threads_cannot_exchange_at_once():
    errors = []

    def call_too():
        try:
            with exclusive("gather"):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    with exclusive("broadcast"):
        other = threading.Thread(target=call_too, name="other")
        other.start()
        other.join()
    with exclusive("gather"):  # The turn has been given back.
        pass
    assert len(errors) == 1
    assert "gather was called in the thread 'other' while another" in errors[0]


@pytest.mark.parametrize(("members", "limit"), [(2, 16384), (8, 16384), (16, 4096), (512, 1024)])
def test_what_goes_along_with_the_comparison_does_not_burden_the_coordinator(members, limit):
    assert exchange._small_bytes(members) == limit
    assert members <= 32 or members**2 * limit <= 2**28
