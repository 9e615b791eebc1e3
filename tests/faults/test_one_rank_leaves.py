"""One process leaves, wherever and however: the others end within ten seconds, with its code."""

import pytest
from faulty_jobs import run_faulty

from tnt_jax.settings import LOST_EXIT_CODE


@pytest.mark.multiprocess
def test_the_others_end_with_77_when_process_0_ends_without_a_word(tmp_path):
    ended = run_faulty(tmp_path, 2, "os._exit(3)", "callback", 0, by="hand")
    assert ended.codes == [3, LOST_EXIT_CODE], ended.output
    assert "Process 0 has ended without leaving the job" in ended.outputs[1]
    assert ended.seconds < 10


KEY_ERROR, MEMORY_ERROR = "raise KeyError('broken')", "raise MemoryError('no memory')"
# How long a process takes for the steps before the batch that cannot be read, and to compile them.
_EARLIER_S = 10


# tests/distributed/test_leaving.py shows nearly the same.
@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.parametrize(
    ("num_processes", "what", "where", "who", "mode", "code", "others"),
    [
        (2, KEY_ERROR, "callback", 0, "fit", 1, 1),
        (3, KEY_ERROR, "data", 1, "fit", 1, 1),
        (2, KEY_ERROR, "validation", 1, "fit", 1, 1),
        (2, KEY_ERROR, "callback", 1, "loop", 1, 1),
        (3, KEY_ERROR, "data", 0, "loop", 1, 1),
        (2, KEY_ERROR, "callback", 0, "evaluate", 1, 1),
        (2, KEY_ERROR, "callback", 1, "predict", 1, 1),
        (2, MEMORY_ERROR, "data", 1, "fit", 1, 1),
        (2, "sys.exit(3)", "data", 0, "fit", 3, 3),
        (2, "sys.exit(3)", "callback", 0, "loop", 3, 3),
        (3, "sys.exit(3)", "callback", 1, "evaluate", 3, 3),
        (3, "os._exit(3)", "data", 0, "fit", 3, LOST_EXIT_CODE),
        (2, "os._exit(3)", "data", 1, "fit", 3, LOST_EXIT_CODE),
        (2, "os._exit(3)", "callback", 0, "loop", 3, LOST_EXIT_CODE),
    ],
)
def test_the_others_end_with_the_code_of_the_one_that_leaves(
    tmp_path, num_processes, what, where, who, mode, code, others
):
    ended = run_faulty(tmp_path, num_processes, what, where, who, mode=mode, by="hand")
    expected = [code if process == who else others for process in range(num_processes)]
    assert ended.codes == expected, ended.output
    assert ended.seconds < 10 + (_EARLIER_S if where == "data" else 0)
    if what.startswith("raise"):
        assert "Traceback" in ended.outputs[who]
