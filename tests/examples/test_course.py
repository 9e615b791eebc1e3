"""What users of NERSC's course type: its batch script, `-d` and `--interactive`."""

import os
import pickle
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import environment

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "examples" / "cifar10"
sys.path[:0] = [str(COURSE)]

import console  # noqa: E402
import train  # noqa: E402


def write_cifar(folder):
    """Writes CIFAR-10's archive with 8 images a file; the class shows in the brightness."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = list(range(8))
        pixels = rng.integers(0, 20, (8, 3072)) + 25 * np.array(labels)[:, None]
        content = {b"data": pixels.astype(np.uint8), b"labels": labels}
        (folder / name).write_bytes(pickle.dumps(content))


def read_until(descriptor, text):
    """Returns what a terminal shows until it has shown `text`."""
    shown = b""
    while text not in shown:
        shown += os.read(descriptor, 4096)
    return shown


def end_console(descriptor, started, timeout_s=90):
    """Types Ctrl-D until the script has ended: the console does not see one that comes before its
    prompt.
    """
    end = time.monotonic() + timeout_s
    while started.poll() is None and time.monotonic() < end:
        os.write(descriptor, b"\x04")
        time.sleep(0.5)


@pytest.fixture
def submitted(tmp_path):
    """A folder as the course's users submit from, whose `tnt-jax` starts two CPU processes."""
    for name in ("configs", "scripts"):
        shutil.copytree(COURSE / name, tmp_path / name)
    for file in COURSE.glob("*.py"):
        shutil.copy(file, tmp_path)
    write_cifar(tmp_path / "data" / "cifar-10-batches-py")
    commands = {"tnt-jax": "-m tnt_jax.launch -n 2 --no-gpu", "python": ""}
    for name, words in commands.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        command.chmod(0o755)
    return tmp_path


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_batch_script_trains_and_opens_a_console(submitted):
    words = "training.n_epochs=2 training.batch_size=4 --interactive"
    ours, theirs = pty.openpty()
    started = subprocess.Popen(
        ["bash", "scripts/cifar_cnn.sh", *words.split()],
        cwd=submitted,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(
            SLURM_SUBMIT_DIR=str(submitted),
            HOME=str(submitted),
            PATH=f"{submitted / 'bin'}:{os.environ['PATH']}",
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        ),
    )
    os.close(theirs)  # A read of `ours` then fails when the script has ended.
    try:
        shown = read_until(ours, b"Ctrl-D ends the console")
        os.write(ours, b"len(history['loss']), 6 * 7\n")
        shown += read_until(ours, b"(2, 42)")
        os.write(
            ours,
            b"module.apply(variables, __import__('numpy').ones((2, 32, 32, 3)), train=False).shape\n",
        )
        shown += read_until(ours, b"(2, 10)")
        end_console(ours, started)
        assert started.returncode == 0
    finally:
        started.kill()
        os.close(ours)
    assert b"Initialized rank 0 out of 2" in shown
    assert b"Best val_accuracy" in shown
    history = np.load(submitted / "tnt-jax" / "cifar10-cnn" / "history.npz")
    assert (history["n_ranks"], len(history["val_loss"])) == (2, 2)


def test_without_a_terminal_the_console_says_so(use_ranks, monkeypatch, capsys):
    use_ranks(1)
    monkeypatch.setattr(console, "terminal", lambda: None)
    console.interact({})
    assert "there is no terminal" in capsys.readouterr().out


def test_a_script_alone_reads_from_its_own_terminal_only(monkeypatch):
    monkeypatch.delenv("TNT_JOB_ID", raising=False)
    code = "import console; print(console.terminal())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=f"{COURSE}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"),
    )
    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize(
    "words",
    ["-d", "configs/hello.yaml -d --interactive", "configs/hello.yaml training.n_epochs=1 -d -v"],
)
def test_the_courses_flags_stand_anywhere(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    args = train.parse_args()
    assert args.distributed
    assert args.interactive == ("--interactive" in words)
    assert args.changes == [word for word in words.split() if "=" in word]


def test_the_folder_of_the_batch_logs_exists():
    # SLURM drops the output of a job whose folder is missing.
    assert (COURSE / "logs" / ".gitignore").is_file()
