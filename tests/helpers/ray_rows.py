"""Rows in Ray datasets whose blocks differ in size, and sources of several simulated processes."""

import contextvars
import itertools
import threading

import numpy as np
from boards import Boards

from tnt_jax.data.layout import RankSlice


def rank_slices(num_processes, local_ranks=1):
    return [
        RankSlice(num_processes * local_ranks, process * local_ranks, local_ranks)
        for process in range(num_processes)
    ]


def columns(num_rows):
    """Returns a row's number, its inputs and its targets, which tell it from all others."""
    rows = np.arange(num_rows)
    return {"x": np.stack([rows, rows**2], 1).astype(np.float32), "y": rows.astype(np.int32)}


def dataset_of(data, num_rows, *, num_blocks=1, sizes=()):
    """Returns a dataset of `columns(num_rows)` in equal blocks, or in blocks of `sizes`."""
    from ray.data.block import BlockAccessor

    whole = columns(num_rows)
    ends = [0, *np.cumsum(sizes)] if sizes else np.linspace(0, num_rows, num_blocks + 1).astype(int)
    assert ends[-1] == num_rows
    parts = [
        {name: column[begin:end] for name, column in whole.items()}
        for begin, end in itertools.pairwise(ends)
    ]
    return data.from_blocks([BlockAccessor.batch_to_block(part) for part in parts])


def in_processes(make, num_processes, work):
    """Makes a source for each simulated process, and returns what `work(source)` returns there, or
    its exception.
    """
    # On a busy machine it takes long until Ray has started a process.
    boards = Boards(num_processes, timeout_s=150)
    results = [None] * num_processes

    def run(process):
        try:
            results[process] = work(make(process, boards.of(process)))
        except Exception as error:
            results[process] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, p), daemon=True)
        for p in range(num_processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive(), "a process hangs"
    return results
