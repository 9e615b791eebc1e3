"""What the launcher does with signals for a job, and with processes that end with exit code 75."""

import os
import signal
from types import SimpleNamespace

import pytest

from tnt_jax.distributed import stopping
from tnt_jax.keras_compat.fit.hooks import Place, Progress
from tnt_jax.keras_compat.fit.resume import save_and_exit
from tnt_jax.launch.processtree import descendants
from tnt_jax.launch.remote.session import preemption_cause

SAVES = """
import os, signal, subprocess, sys, time
rank = int(os.environ["TNT_PROCESS_ID"])
worker = subprocess.Popen(["sleep", "60"])

def save(signum, frame):
    # The second process ends after the first: nothing must hurry it.
    if rank == 1:
        time.sleep(1)
    print(rank, "saved, worker", "ended" if worker.poll() else "runs", flush=True)
    signal.signal(signum, lambda *_: print("hurried", flush=True))
    time.sleep(0.2)
    sys.exit(75)

for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, save)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("signum", "to"), [
    (signal.SIGTERM, "launcher"), (signal.SIGUSR1, "launcher"), (signal.SIGTERM, "supervisor"),
])  # fmt: skip
def test_launcher_ends_with_75_once_all_have_saved(tnt_jax, script, signum, to):
    launcher = tnt_jax("-n", 2, "--no-gpu", "--output-on-all-devices", script(SAVES))
    for _ in range(2):
        assert "up" in launcher.stdout.readline()
    os.kill(launcher.pid if to == "launcher" else descendants(launcher.pid)[0], signum)
    out, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 75, err
    assert sorted(out.splitlines()) == [
        "[rank 0] 0 saved, worker runs",
        "[rank 1] 1 saved, worker runs",
    ]


@pytest.mark.multiprocess
def test_process_that_does_not_follow_one_with_75_is_killed_after_the_grace_period(tnt_jax, script):
    path = script(
        "import os, sys, time\nprint('up', flush=True)\n"
        "sys.exit(75) if os.environ['TNT_PROCESS_ID'] == '0' else time.sleep(600)"
    )
    launcher = tnt_jax("-n", 2, "--no-gpu", "--grace-period", 0.5, path)
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 75
    assert "Rank 0 has saved its state and ended" in err


@pytest.mark.parametrize("to", ["", " to process 3"])
def test_launcher_reads_the_signal_from_what_fit_says(monkeypatch, caplog, to):
    watch = SimpleNamespace(reason=f"SIGUSR1 came{to}", signum=signal.SIGUSR1)
    codes = []
    monkeypatch.setattr(stopping, "current", lambda: watch)
    monkeypatch.setattr(stopping, "leave", codes.append)
    callbacks = SimpleNamespace(call=lambda *args: None)
    save_and_exit(lambda: True, callbacks, Progress(place=Place(1, 7)), {})
    cause = f"it was preempted: SIGUSR1 came{to}, and the state is saved"
    assert (codes, preemption_cause(caplog.text.encode())) == ([75], cause)
    assert preemption_cause(b"saved by the script itself") == ""
