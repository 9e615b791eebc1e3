"""Processes whose data differs: one error on all of them instead of a hang."""

import threading
import time

import numpy as np
import pytest
from boards import Boards
from processes import SCRIPTS, launch

from tnt_jax.data.agreement import Exchange
from tnt_jax.data.sources import HostBatch
from tnt_jax.data.streams import in_lockstep


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("in_memory", "words"),
    # The steps of data that Keras and TensorFlow hold are counted in the tests of each.
    [("1", []), pytest.param("0", ["packages"], marks=pytest.mark.long)],
)
def test_what_differs_between_processes_is_one_error_on_all(in_memory, words):
    result = launch(
        2, SCRIPTS / "uneven_data.py", *words, flags=["--output-on-all-devices"], timeout_s=200,
        TNT_SHARED_MEMORY=in_memory,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("all cases") == 2
    assert result.stdout.count("stopped together") == 2


def read(lengths, *, rows=4, fails=None, slow=None):
    """Returns for each process the steps that it took and its error."""
    boards = Boards(len(lengths))
    taken, errors = [0] * len(lengths), [None] * len(lengths)

    def items(process):
        for step in range(lengths[process]):
            if fails == (process, step):
                raise OSError("corrupt")
            if process == slow:
                time.sleep(0.001)
            yield HostBatch(np.full((rows, 2), step), None, rows)

    def work(process):
        try:
            for step, item in enumerate(
                in_lockstep(items(process), Exchange(boards.of(process), "x"), where="epoch 1")
            ):
                assert (item.data == step).all()
                taken[process] += 1
        except Exception as error:
            errors[process] = error

    threads = [
        threading.Thread(target=work, args=(process,), daemon=True)
        for process in range(len(lengths))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return taken, errors, boards.most


@pytest.mark.parametrize("lengths", [(7, 7), (0, 0, 0), (1, 1), (200, 200, 200)])
@pytest.mark.parametrize("slow", [None, 1])
def test_equal_data_is_read_to_its_end(lengths, slow):
    taken, errors, most = read(lengths, slow=slow)
    assert taken == list(lengths)
    assert errors == [None] * len(lengths)
    assert most <= 3 * len(lengths), "What all have read is removed."


@pytest.mark.parametrize("lengths", [(7, 5), (5, 7), (0, 1), (100, 99, 100), (40, 39, 38)])
@pytest.mark.parametrize("slow", [None, 0, 1])
def test_all_stop_after_the_same_step_where_data_ends_sooner(lengths, slow):
    taken, errors, _ = read(lengths, slow=slow)
    assert taken == [min(lengths)] * len(lengths)
    shortest = lengths.index(min(lengths))
    assert {str(error) for error in errors} == {str(errors[0])}
    assert (
        f"The data of process {shortest} has ended after {min(lengths)} batch(es) of epoch 1, "
        f"but process" in str(errors[0])
    )


@pytest.mark.parametrize("step", [0, 1, 6, 33])
@pytest.mark.parametrize("slow", [None, 0, 1])
def test_an_error_in_the_data_comes_after_the_steps_before_it_on_all(step, slow):
    taken, errors, _ = read((40, 40, 40), fails=(1, step), slow=slow)
    assert taken == [step] * 3
    assert isinstance(errors[1], OSError)
    assert str(errors[0]) == str(errors[2]) == "The data of process 1 failed: OSError: corrupt"
