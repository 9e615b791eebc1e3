"""How processes end when one of them leaves the job: in real processes, each started by hand, and
by the launcher.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import environment, free_address, launch

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax.distributed.leaving import Membership
from tnt_jax.distributed.liveness.phases import calling, describe_wait, here, in_phase, waiting
from tnt_jax.settings import LOST_EXIT_CODE

# The arguments: what happens, where, and on which process.
SCRIPT = """
import os, sys, time
import numpy as np, flax.linen as nn, tnt_jax as tnt

what, where, who = sys.argv[1], sys.argv[2], int(sys.argv[3])
# Set-up.

def act(here):
    if here == where and tnt.get_process_index() == who:
        exec(what)

class Act(tnt.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2: act("callback")

def batches():
    while True:
        for index in range(8):
            if index == 2: act("data")
            yield np.zeros((4, 3), "f4"), np.zeros((4, 1), "f4")

model = tnt.Model(nn.Dense(1))
model.compile("sgd", loss="mse")
act("before")
epochs = 3 if where == "after" else 10**6
model.fit(batches(), steps_per_epoch=8, epochs=epochs, verbose=0, callbacks=[Act()])
act("after")
print("process", tnt.get_process_index(), "ends well", flush=True)
"""


def run(tmp_path, num_processes, what, where, who, setup=""):
    """Returns for each process its exit code, its output, and how many seconds after the first it
    ended.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("# Set-up.", setup))
    job = {"TNT_COORDINATOR_ADDRESS": free_address(), "TNT_NUM_PROCESSES": str(num_processes)}
    with contextlib.ExitStack() as files:
        started = [
            subprocess.Popen(
                [sys.executable, script, what, where, str(who)], stderr=subprocess.STDOUT,
                stdout=files.enter_context(open(tmp_path / str(process), "w")),
                env=environment(**job, TNT_PROCESS_ID=str(process)),
            )
            for process in range(num_processes)
        ]  # fmt: skip
        ended, deadline = {}, time.monotonic() + 100
        try:
            while len(ended) < num_processes and time.monotonic() < deadline:
                ended |= {
                    popen: time.monotonic()
                    for popen in started
                    if popen not in ended and popen.poll() is not None
                }
                time.sleep(0.05)
        finally:
            for popen in started:
                popen.kill()
                popen.wait()
    first = min(ended.values())
    outputs = [(tmp_path / str(process)).read_text() for process in range(num_processes)]
    return [
        (popen.returncode, output, ended.get(popen, deadline) - first)
        for popen, output in zip(started, outputs, strict=True)
    ]


LEAVING = [
    (2, "sys.exit(3)", "callback", 1, 3, "Process 1 has left the job (sys.exit(3))"),
    (2, "sys.exit(0)", "data", 1, 0, "Process 1 has left the job (sys.exit(0))"),
    (2, "exit(4)", "callback", 0, 4, "Process 0 has left the job (sys.exit(4))"),
    (
        2,
        "raise KeyError('broken on one rank')",
        "callback",
        0,
        1,
        "Process 0 has left the job (KeyError: 'broken on one rank')",
    ),
    (3, "sys.exit(3)", "callback", 2, 3, "Process 2 has left the job (sys.exit(3))"),
    # All processes raise an error of one's data; that one ends first.
    (2, "raise OSError('corrupt')", "data", 0, 1, "Process 0 has left the job (OSError: corrupt)"),
]
# Those of process 1 and of three processes differ little from the others, and an error in a callback
# is that of `test_process_0_ends_after_...`.
LONG = [case for case in LEAVING if case[3] or "Key" in case[1]]


@pytest.mark.multiprocess
def test_the_end_of_the_interpreter_needs_no_thread_of_its_own(tmp_path):
    # Python 3.12 starts none then; what is registered last runs first.
    refuse = """
import atexit, threading
def refuse(thread): raise RuntimeError("can't create new thread at interpreter shutdown")
tnt.init()
atexit.register(lambda: setattr(threading.Thread, "start", refuse))
"""
    for code, output, _ in run(tmp_path, 2, "pass", "after", 0, setup=refuse):
        assert code == 0, output
        assert "can't create" not in output


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("num_processes", "what", "where", "who", "code", "says"),
    [pytest.param(*case, marks=[pytest.mark.long] if case in LONG else []) for case in LEAVING],
)
def test_a_process_that_leaves_ends_those_that_wait_for_it_with_its_code(
    tmp_path, num_processes, what, where, who, code, says
):
    for process, (found, output, later_s) in enumerate(
        run(tmp_path, num_processes, what, where, who)
    ):
        assert later_s < 10
        assert found == code, output
        if process != who:
            assert says in output
            assert f"ends with exit code {code}." in output
            assert "Traceback" not in output, (
                "It is a consequence, and the reason is told elsewhere."
            )


# Process 0 believes that the other is disconnected as soon as that one says that it ends, and the
# other takes its time.
SLOW_DISCONNECTION = """
import time
from tnt_jax import _jax
from tnt_jax.distributed import leaving

class Slow:
    def __init__(self, client): self.client = client
    def __getattr__(self, name): return getattr(self.client, name)
    def shutdown(self):
        time.sleep(0.5)
        self.client.shutdown()

def has_announced(client, num_processes):
    while len(client.key_value_dir_get("tnt_jax/left")) < num_processes: time.sleep(0.02)

tnt.init()
_jax.await_disconnection = has_announced
own = leaving._membership.get()
if tnt.get_process_index() == 1: own.client = Slow(own.client)
"""


@pytest.mark.long  # Ten seconds of waiting.
@pytest.mark.multiprocess
@pytest.mark.slow
def test_process_0_ends_after_the_others_have_read_that_they_are_disconnected(tmp_path):
    what = "raise KeyError('broken on one rank')"
    for code, output, _ in run(tmp_path, 2, what, "callback", 0, setup=SLOW_DISCONNECTION):
        assert code == 1, output


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "who", "codes"),
    [
        pytest.param("time.sleep(10)", 0, [0, 0], marks=pytest.mark.long),
        pytest.param("time.sleep(6)", 1, [0, 0], marks=pytest.mark.long),
        ("sys.exit(3)", 1, [0, 3]),
    ],
)
def test_a_process_that_needs_no_other_goes_on_to_its_own_end(tmp_path, what, who, codes):
    results = run(tmp_path, 2, what, "after", who)
    assert [code for code, _, _ in results] == codes, results
    for process, (code, output, _) in enumerate(results):
        assert "ERROR" not in output
        assert (f"process {process} ends well" in output) == (code == 0)


@pytest.mark.multiprocess
def test_the_launcher_blames_the_process_that_left_without_a_word(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = launch(2, script, "os._exit(0)", "callback", 1)
    assert result.returncode == LOST_EXIT_CODE
    assert "Process 1 has ended without leaving the job" in result.stderr
    assert "Rank 1 ended with exit code 0, but without leaving the job" in result.stderr
    assert "Rank 0 on localhost failed" not in result.stderr


# As if each process ran on a machine of its own.
UNWATCHED = """
def refuse(pid): raise OSError
os.pidfd_open = refuse
"""


@pytest.mark.long  # The tests on several hosts have real ones.
@pytest.mark.multiprocess
def test_a_process_of_another_machine_that_dies_is_named_by_all_others(tmp_path):
    *others, _ = run(tmp_path, 3, "os._exit(0)", "callback", 2, setup=UNWATCHED)
    for code, output, later_s in others:
        assert code == LOST_EXIT_CODE, output
        assert "Process 2 has ended without leaving the job (it does not answer" in output
        assert "Traceback" not in output
        assert later_s < 15


def waits_during(call):
    """Returns what `describe_wait` says of the main thread again and again during a call."""
    found, ended = [], threading.Event()

    def sample():
        while not ended.wait(0.02):
            found.append(describe_wait())

    thread = threading.Thread(target=sample)
    thread.start()
    call()
    ended.set()
    thread.join()
    return found


def test_only_calls_of_ours_count_as_waiting_for_others(use_ranks):
    use_ranks(1)

    @jax.jit
    def slow(x):
        a = jnp.full((256, 256), x.sum())
        return x + jax.lax.fori_loop(0, 1000, lambda _, a: jnp.tanh(a @ a), a).sum()

    class Slow(nn.Module):
        @nn.compact
        def __call__(self, x):
            return slow(x)

    x = np.ones((1, 2), "f4")
    assert set(waits_during(lambda: time.sleep(0.2))) == {None}
    assert set(waits_during(lambda: np.asarray(slow(x)))) == {None}, (
        "The user's own program waits for nobody."
    )
    model = tnt.Model(Slow())
    model.compile("sgd", loss="mse")
    for name, call in [
        ("predict", lambda: model.predict(x, verbose=0)),
        ("predict_on_batch", lambda: model.predict_on_batch(x)),
        ("test_on_batch", lambda: model.test_on_batch(x, x)),
        ("train_on_batch", lambda: model.train_on_batch(x, x)),
    ]:
        waits = [wait for wait in waits_during(call) if wait is not None]
        assert len(waits) > 5
        assert {wait.partition(",")[0] for wait in waits} == {f"in Model.{name}"}


def test_a_process_waits_where_its_main_thread_says_so():
    with calling("Model.fit"), in_phase("callback"):
        assert describe_wait() is None
        with waiting("a value"):
            assert describe_wait() == "in Model.fit, in a callback"
    for phase, is_wait in [("step", True), ("compile", True), ("save", False), ("loop", False)]:
        with in_phase(phase):
            assert (describe_wait() is not None) == is_wait
    # A thread waits for data of others: the main thread waits, too, if it takes data.
    here().waits[-1] = "data of process 1"
    try:
        for phase, is_wait in [("data", True), ("callback", False), ("", False)]:
            with in_phase(phase):
                assert (describe_wait() is not None) == is_wait
    finally:
        del here().waits[-1]


@pytest.mark.parametrize(("decided", "code"), [(None, LOST_EXIT_CODE), (3, 3), (0, 0)])
def test_a_process_whose_end_is_decided_keeps_its_code_when_the_coordinator_has_gone(
    monkeypatch, decided, code
):
    def end(found):
        raise SystemExit(found)

    monkeypatch.setattr(_jax, "coordinator_listens", lambda: False)
    monkeypatch.setattr("os._exit", end)
    own = Membership(client=None, process=1, num_processes=2)
    own._final_code = decided
    with pytest.raises(SystemExit) as ended:
        own.end_without_service()
    assert ended.value.code == code


@pytest.mark.parametrize("later_s", [0, 20, 40])
@pytest.mark.parametrize("change_s", [3600.0, -3600.0, 0.1])
def test_an_abort_soon_after_a_change_of_the_clock_says_so(monkeypatch, capsys, change_s, later_s):
    def end(found):
        raise SystemExit(found)

    monkeypatch.setattr(_jax, "coordinator_listens", lambda: True)
    monkeypatch.setattr("os._exit", end)
    own = Membership(client=None, process=1, num_processes=2)
    clock, passing = time.time, time.monotonic
    monkeypatch.setattr("time.time", lambda: clock() + change_s)
    own._clock_change_s()
    monkeypatch.setattr("time.time", lambda: clock() + change_s + later_s)
    monkeypatch.setattr("time.monotonic", lambda: passing() + later_s)
    is_said = abs(change_s) > 1 and later_s < 30
    with pytest.raises(SystemExit) if is_said else contextlib.nullcontext() as ended:
        own.end_without_service()
    said = capsys.readouterr().err
    assert (f"was changed by {change_s:+.0f} s, or the machine was suspended" in said) == is_said
    assert not is_said or ended.value.code == LOST_EXIT_CODE


def test_an_abort_whose_last_call_hangs_is_ended_by_the_system(tmp_path):
    script = tmp_path / "abort.py"
    script.write_text(
        "import os, threading\n"
        "from tnt_jax._jax import processes\n"
        "processes._LONGEST_LAST_CALL_S = 1\n"
        "undo = processes.before_abort(threading.Event().wait)\n"
        "os.abort()\n"
    )
    result = subprocess.run([sys.executable, script], env=environment(), timeout=60, check=False)
    assert result.returncode == -signal.SIGALRM


@pytest.mark.multiprocess
def test_a_forked_process_that_exits_does_not_end_the_job(tmp_path):
    script = tmp_path / "fork.py"
    script.write_text(
        "import os, sys, tnt_jax as tnt\n"
        "tnt.barrier()\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(7)\n"
        "print('code', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "tnt.barrier()\n"
    )
    result = launch(2, script, flags=["--output-on-all-devices"], timeout_s=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("code 7") == 2


def test_only_the_exit_that_ends_the_interpreter_is_noted(tmp_path):
    script = tmp_path / "exit.py"
    script.write_text(
        "import sys, threading\n"
        "from types import SimpleNamespace\n"
        "from tnt_jax.distributed import leaving\n"
        "codes = []\n"
        "own = SimpleNamespace(remember_exit=codes.append, end_without_service=print)\n"
        "own.leave_at_exit = lambda: print('noted', codes)\n"
        "leaving._membership.set(own)\n"
        "leaving._hook_in(own)\n"
        "try: sys.exit(1)\n"
        "except SystemExit as error: assert error.code == 1\n"
        "thread = threading.Thread(target=sys.exit, args=(2,))\n"
        "thread.start()\n"
        "thread.join()\n"
        "try: exit(3)\n"
        "finally: print('last words')\n"
    )
    command = [sys.executable, script]
    result = subprocess.run(
        command, env=environment(), timeout=120, check=False, capture_output=True, text=True
    )
    assert result.returncode == 3, result.stderr
    assert result.stdout == "last words\nnoted [3]\n"
