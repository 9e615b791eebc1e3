import contextvars
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from boards import Boards

from tnt_jax.data import agreement
from tnt_jax.data.agreement import CoordinationBoard, Exchange, Report
from tnt_jax.data.layout import RankSlice
from tnt_jax.data.shards import ShardSource
from tnt_jax.distributed.liveness import phases, rendezvous


def run(shards, *, local_ranks=1, epochs=1, **kwargs):
    """Iterates one source per process in threads; returns their batches, or the exception, by
    process.
    """
    boards = Boards(len(shards))
    results = [None] * len(shards)

    def work(process):
        try:
            rank_slice = RankSlice(len(shards) * local_ranks, process * local_ranks, local_ranks)
            source = ShardSource(
                shards[process], rank_slice=rank_slice, board=boards.of(process), **kwargs
            )
            results[process] = (source, [list(source.batches(epoch)) for epoch in range(epochs)])
        except Exception as error:
            results[process] = error

    threads = [
        threading.Thread(target=work, args=(process,), daemon=True)
        for process in range(len(shards))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a process hangs"
    return results, boards


def shard(first, *rows):
    """Batches of the given numbers of rows, counting on from `first`."""
    ends = np.cumsum([0, *rows]) + first
    return [(np.arange(a, b), np.arange(a, b) * 2.0) for a, b in itertools.pairwise(ends)]


class Stream:
    """An iterable without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize(
    "rows",
    [
        [(4, 4, 4), (4, 4, 4)],
        [(4, 4, 4), (4, 4, 2)],
        [(4,), (4,) * 13],
        [(4,) * 9, (4,) * 4, (3,)],
        [(4, 1), (4, 4, 4, 3), (2, 4, 4, 4, 4, 4, 4, 4, 1)],
    ],
)
@pytest.mark.parametrize("wrap", [list, Stream])
@pytest.mark.parametrize("local_ranks", [1, 2])
def test_unequal_shards_take_equal_steps_and_every_row_counts_once(rows, wrap, local_ranks):
    shards = [wrap(shard(1000 * process, *sizes)) for process, sizes in enumerate(rows)]
    results, boards = run(shards, local_ranks=local_ranks, epochs=2)
    num_steps = max(len(sizes) for sizes in rows)
    for epoch in range(2):
        streams = [batches[epoch] for _, batches in results]
        assert {len(stream) for stream in streams} == {num_steps}
        for step in zip(*streams, strict=True):
            assert len({batch.mask is None for batch in step}) == 1
            assert len({batch.num_rows for batch in step}) == 1
            assert {len(batch.data[0]) for batch in step} == {4}
            assert step[0].num_rows == sum(
                4 if batch.mask is None else int(batch.mask.sum()) for batch in step
            )
        for process, stream in enumerate(streams):
            seen = np.concatenate(
                [b.data[0] if b.mask is None else b.data[0][b.mask > 0] for b in stream]
            )
            np.testing.assert_array_equal(seen, np.arange(sum(rows[process])) + 1000 * process)
    for source, _ in results:
        source.compare([other.note for other, _ in results])
        assert source.num_batches == (num_steps if wrap is list else None)
    assert {source.global_batch_size for source, _ in results} == {4 * len(rows)}
    assert boards.most <= 6 * len(rows)  # Old reports are taken away.


def test_full_steps_need_no_mask():
    results, _ = run([shard(0, 4, 4), shard(100, 4, 3)])
    for _, (batches,) in results:
        assert [batch.mask is None for batch in batches] == [True, False]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("good", [0, 3, 6])
def test_error_on_one_process_ends_all_with_that_error(failing, good):
    def broken():
        yield from shard(0, *[4] * good)
        raise OSError("train-7.tfrecord: record 12 is truncated")

    shards = [Stream(shard(0, *[4] * 20)), Stream(shard(0, *[4] * 20))]
    shards[failing] = broken()
    results, _ = run(shards)
    assert isinstance(results[failing], OSError)
    assert isinstance(results[1 - failing], RuntimeError)
    assert (
        str(results[1 - failing])
        == f"The data of process {failing} failed: OSError: train-7.tfrecord: record 12 is "
        f"truncated"
    )


def test_empty_shard_is_named_on_all_processes():
    results, _ = run([shard(0, 4), []])
    for error in results:
        assert isinstance(error, ValueError)
        assert "The dataset of process 1 is empty" in str(error)


def test_batch_that_does_not_fit_is_named_on_all_processes():
    results, _ = run([shard(0, 4, 4), shard(0, 4, 5)], micro_batch_size=4)
    for error in results:
        assert isinstance(error, ValueError)
        assert (
            "A batch of process 1 has 5 rows, but with 4 rows a rank its 1 rank(s) take 4"
            in str(error)
        )


def rows(count, width):
    return np.zeros((count, width))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (([rows(4, 3)], [rows(4, 2)]), r"float64\[3\] on process 0 and float64\[2\] on process 1"),
        (
            ([rows(4, 3)] * 2, [rows(4, 3), {"x": rows(4, 3)}]),
            r"float64\[3\] on process 0 and \['x'\] float64\[3\] on process 1",
        ),
        # The second shard ends first, and would repeat a row of width 3 beside those of width 5.
        (
            ([rows(4, 3), rows(4, 3), rows(4, 5)], [rows(4, 3)]),
            r"float64\[5\] on process 0 and float64\[3\] on process 1",
        ),
        (([rows(4, 3)], [(rows(4, 3), rows(3, 1))]), "same number of rows"),
        (([rows(4, 3)] * 7, [*[rows(4, 3)] * 6, rows(0, 3)]), "at least one row"),
        (([rows(4, 3)] * 7, [*[rows(4, 3)] * 6, ["text"]]), "arrays of numbers"),
    ],
)
def test_batches_that_do_not_go_together_are_refused_on_all_processes(shards, message):
    results, _ = run(list(shards))
    for error in results:
        assert isinstance(error, (ValueError, RuntimeError, TypeError))
        assert re.search(message, str(error))


def test_widths_may_differ_from_step_to_step():
    results, _ = run([[rows(4, 3), rows(4, 5)], [rows(4, 3), rows(2, 5)]])
    assert [[batch.data.shape for batch in batches[0]] for _, batches in results] == [
        [(4, 3), (4, 5)]
    ] * 2


def test_iterator_is_read_on_from_epoch_to_epoch():
    results, _ = run([iter(shard(0, 4, 4)), iter(shard(50, 4, 4))], epochs=1)
    assert [len(batches[0]) for _, batches in results] == [2, 2]


def test_start_batch_skips():
    source = ShardSource(shard(0, 2, 2, 2), rank_slice=RankSlice(1), board=Boards(1).of(0))
    assert [batch.data[0].tolist() for batch in source.batches(0, start_batch=2)] == [[4, 5]]


def test_one_process_needs_no_service():
    source = ShardSource(shard(0, 2, 1), rank_slice=RankSlice(1), micro_batch_size=2)
    first, second = source.batches(0)
    assert first.mask is None
    np.testing.assert_array_equal(second.mask, [1, 0])
    assert second.num_rows == 1


class Service:
    """A stand-in for JAX's coordination client that has no answer `misses` times."""

    def __init__(self, misses):
        self.misses = misses
        self.store = {"tnt_jax/x/0/1": '{"num_rows": [3], "has_ended": true, "local_ranks": 1}'}

    def key_value_set(self, key, value):
        self.store[key] = value

    def key_value_try_get(self, key):
        if self.misses:
            self.misses -= 1
            raise agreement.jax.errors.JaxRuntimeError("NOT_FOUND: Config key not found.")
        return self.store[key]

    def key_value_delete(self, key):
        del self.store[key]


def test_who_waits_for_the_data_of_a_process_says_so(monkeypatch):
    service, noted = Service(misses=2), []
    get = service.key_value_try_get
    service.key_value_try_get = lambda *args: (
        noted.append(phases.here().note().waits),
        get(*args),
    )[1]
    monkeypatch.setattr(rendezvous._jax, "coordination_client", lambda: service)
    monkeypatch.setattr(agreement.jax, "process_count", lambda: 2)
    exchange = Exchange(CoordinationBoard(), "x")
    exchange.post(Report([1], has_ended=False, local_ranks=1))
    assert [report.num_rows for report in exchange.read()] == [[1], [3]]
    assert noted == ["data of process 1"] * 3
    assert phases.here().note().waits == ""
    exchange.post(Report([1], has_ended=False, local_ranks=1))
    stopped = threading.Event()
    stopped.set()
    monkeypatch.setattr(
        agreement, "reader_stopped", contextvars.ContextVar("stopped", default=stopped)
    )
    with pytest.raises(InterruptedError, match="no longer used"):
        exchange.read()


SCRIPT = """
import sys
import numpy as np
import tnt_jax as tnt
from tnt_jax.data.feed import Feed, rank_slice_of
from tnt_jax.data.shards import ShardSource

runtime = tnt.init()
process, mode = tnt.get_process_index(), sys.argv[1]

def shard():
    for step in range(3 if process == 0 else 11):
        if mode == "fail" and process == 1 and step == 6:
            raise OSError("record 6 is corrupt")
        yield np.full(2 if step < 2 else 1, 100 * process + step)

source = ShardSource(shard(), rank_slice=rank_slice_of(runtime))
source.compare([None, None])
with Feed(source.batches(0), lambda batch: batch) as feed:
    batches = list(feed)
rows = [int(x) for b in batches for x, m in zip(b.data, np.ones(len(b.data)) if b.mask is None else b.mask) if m]
print(process, len(batches), rows, flush=True)
tnt.barrier()
"""


def run_processes(mode):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for process in range(2):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TNT_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "TNT_NUM_PROCESSES": "2",
            "TNT_PROCESS_ID": str(process), "PYTHONPATH": str(Path(__file__).parents[2]),
        }  # fmt: skip
        command = [sys.executable, "-c", SCRIPT, mode]
        started.append(
            subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    outputs = [process.communicate(timeout=120) for process in started]
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.multiprocess
def test_two_real_processes_with_unequal_shards():
    results = run_processes("good")
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[0][1] == "0 11 [0, 0, 1, 1, 2]\n"
    assert results[1][1] == f"1 11 {[100, 100, 101, 101, *range(102, 111)]}\n"


@pytest.mark.multiprocess
def test_two_real_processes_end_with_the_error_of_one():
    results = run_processes("fail")
    assert all(code != 0 for code, _, _ in results)
    assert "OSError: record 6 is corrupt" in results[1][2]
    assert "The data of process 1 failed: OSError: record 6 is corrupt" in results[0][2]
