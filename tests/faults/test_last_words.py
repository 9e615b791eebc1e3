"""The launcher names a rank that dies, with its host, process, way of dying, and last words."""

import re

import pytest
from processes import launch

from tnt_jax.launch.remote.session import failure_report, gist

DEATHS = [
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by signal 9 (SIGKILL)", ""),
    ("os._exit(9)", 9, "failed with exit code 9", ""),
    (
        "import ctypes; ctypes.string_at(0)",
        139,
        "was ended by signal 11 (SIGSEGV)",
        "Fatal Python error: Segmentation fault",
    ),
    (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "    bytearray(1 << 40)",
        1,
        "failed with exit code 1",
        "MemoryError",
    ),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("death", "code", "how", "words"), DEATHS)
def test_rank_that_dies_is_named_with_its_last_words(tmp_path, death, code, how, words):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "if os.environ['TNT_PROCESS_ID'] == '1':\n"
        "    print('the last words of', os.getpid(), file=sys.stderr, flush=True)\n"
        f"    {death}\n"
        "time.sleep(60)\n"
    )
    done = launch(2, script, timeout_s=30)
    assert done.returncode == code
    (pid,) = re.findall(r"the last words of (\d+)", done.stderr)
    named = f"Rank 1 on localhost {how}. It was process {pid}."
    assert done.stderr.startswith(f"[tnt-jax] {named}")
    assert words in done.stderr
    assert "Rank 0" not in done.stderr


@pytest.mark.parametrize(
    ("code", "kills", "is_said"), [(137, 1, True), (137, 0, False), (1, 1, False)]
)
def test_lack_of_memory_is_said_of_a_killed_rank_alone(code, kills, is_said):
    message = {"rank": 1, "pid": 4711, "code": code, "tail": "", "memory_kills": kills}
    report = failure_report("node1", message, shown=False)
    said = "The kernel of node1 has killed 1 process(es) for lack of memory since the start."
    assert (said in report) == is_said


@pytest.mark.parametrize(
    ("said", "culprit"),
    [
        (
            "Process 0 has left the job (KeyError: 'broken'). Process 1 waits for it in fit.",
            "Process 0 has left the job (KeyError: 'broken')",
        ),
        (
            "Process 0, which coordinates the job, has not answered process 1 for 8 s: it is "
            "stopped. If it would have gone on, raise the limit.",
            "Process 0, which coordinates the job, has not answered process 1 for 8 s: it is stopped",
        ),
        (
            "Process 2 has made no progress for 60 s (TNT_STALL_TIMEOUT is 60 s) in Model.fit, "
            "epoch 1, step 3.\nPython stack of its main thread",
            "Process 2 has made no progress for 60 s (TNT_STALL_TIMEOUT is 60 s) in Model.fit, "
            "epoch 1, step 3",
        ),
        (
            "The clock of node1 was changed by +3600 s, or the machine was suspended: JAX's "
            "service. Process 1 cannot go on without it.",
            "The clock of node1 was changed by +3600 s, or the machine was suspended: JAX's service",
        ),
        ("The data cannot be read.", ""),
    ],
)
def test_the_report_on_a_rank_that_another_has_ended_begins_with_the_other(said, culprit):
    tail = f"a line\n[tnt_jax] ERROR: {said}\n"
    message = {"rank": 1, "pid": 4711, "code": 76, "tail": tail, "memory_kills": 0}
    own = "Rank 1 on node1 failed with exit code 76. It was process 4711."
    first = gist(failure_report("node1", message, shown=False))
    assert first == (f"{culprit}. {own}" if culprit else own)
