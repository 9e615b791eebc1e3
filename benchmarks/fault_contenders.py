"""The contenders of `benchmarks/faults.py`: how each starts its job, and what runs of it."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

JOBS = Path(__file__).parent / "fault_jobs"
_RESTARTS = "3"


@dataclass(frozen=True)
class Contender:
    """How a job is started.

    Attributes:
        script: The training script.
        commands: From the folder of a trial to the commands that start the job.
        checkpoints: Where its checkpoints lie in that folder.
    """

    script: str
    commands: Callable[[Path], list[tuple[list[str], Mapping[str, str]]]]
    checkpoints: str


def _tnt_jax(folder: Path) -> list[tuple[list[str], Mapping[str, str]]]:
    words = ["-m", "tnt_jax.launch", "-n", "2", "--no-gpu", "--max-restarts", _RESTARTS]
    words += ["--checkpoint-dir", str(folder / "checkpoints"), "--", str(JOBS / "train_tnt.py")]
    return [([sys.executable, *words], {"TNT_STALL_TIMEOUT": "15"})]


def _pytorch(folder: Path) -> list[tuple[list[str], Mapping[str, str]]]:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", _RESTARTS]
    # With the static rendezvous, its default, a restarted worker connects to its dead predecessor.
    words += ["--standalone", str(JOBS / "train_ddp.py")]
    return [([sys.executable, *words], {"OMP_NUM_THREADS": "1"})]


def _keras(folder: Path) -> list[tuple[list[str], Mapping[str, str]]]:
    address = f"127.0.0.1:{_free_port()}"
    return [
        (
            [sys.executable, str(JOBS / "train_keras.py")],
            {"COORDINATOR": address, "WORLD_SIZE": "2", "RANK": str(rank)},
        )
        for rank in range(2)
    ]


CONTENDERS = {
    "tnt_jax": Contender("train_tnt.py", _tnt_jax, "checkpoints"),
    "pytorch": Contender("train_ddp.py", _pytorch, "."),
    "keras": Contender("train_keras.py", _keras, "backup"),
}


class RunningJob:
    """The processes of one start of a job.

    Args:
        contender: Whose job it is.
        folder: Folder of the trial.
        inside: The fault that a process makes itself, or an empty string.

    Attributes:
        num_lines: Lines that it has printed.
        noticed_s: Seconds from the fault to the first line after it, or the first end of a process.
    """

    def __init__(self, contender: Contender, folder: Path, inside: str) -> None:
        self._contender, self._folder = contender, folder
        self.num_lines = 0
        self.noticed_s: float | None = None
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TNT_")}
        common = {"JAX_PLATFORMS": "cpu", "FAULTS_DIR": str(folder), "FAULT": inside}
        self._started = []
        for command, extra in contender.commands(folder):
            self._started.append(
                subprocess.Popen(
                    command,
                    env={**kept, **common, **extra},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=folder,
                )
            )
        self._readers = [
            threading.Thread(target=self._read, args=(popen,), daemon=True)
            for popen in self._started
        ]
        for reader in self._readers:
            reader.start()

    def poll(self) -> int | None:
        """Returns the exit code of the job once all of it has ended."""
        codes = [popen.poll() for popen in self._started]
        if any(code is not None for code in codes):
            self._notice()
        return None if None in codes else next((code for code in codes if code), 0)

    def disturb(self, fault: str, process: int) -> None:
        """Makes a fault from outside happen."""
        words = fault.split()
        if "checkpoint" in words:
            self._damage(is_flip="flipped" in words)
            os.kill(self._worker(process), signal.SIGKILL)
            return
        signum = signal.SIGKILL if words[0] == "kill" else signal.Signals[words[0]]
        to_launcher = words[-1] == "launcher"
        for pid in (
            [popen.pid for popen in self._started] if to_launcher else [self._worker(process)]
        ):
            os.kill(pid, signum)

    def end(self) -> None:
        """Ends what is left of it."""
        for pid in [*self._workers().values(), *(popen.pid for popen in self._started)]:
            with open(os.devnull, "w") as nowhere:
                subprocess.run(["kill", "-9", str(pid)], stderr=nowhere, check=False)
        for popen in self._started:
            popen.wait()

    def _read(self, popen: subprocess.Popen) -> None:
        assert popen.stdout is not None
        with open(self._folder / "output", "ab") as file:
            for line in popen.stdout:
                file.write(line)
                file.flush()
                self.num_lines += 1
                self._notice()

    def _notice(self) -> None:
        happened = self._folder / "fault"
        if self.noticed_s is None and happened.exists() and (text := happened.read_text()):
            self.noticed_s = time.time() - float(text)

    def _worker(self, process: int) -> int:
        return self._workers()[process]

    def _workers(self) -> dict[int, int]:
        """Returns the process ids of the running scripts by rank."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # It has ended.
                continue
            environ = dict(item.split(b"=", 1) for item in variables if b"=" in item)
            is_ours = environ.get(b"FAULTS_DIR") == str(self._folder).encode()
            runs_script = any(word.endswith(self._contender.script.encode()) for word in words)
            rank = environ.get(b"TNT_PROCESS_ID", environ.get(b"RANK"))
            if is_ours and runs_script and rank:
                found[int(rank)] = int(entry.name)
        return found

    def _damage(self, *, is_flip: bool) -> None:
        """Damages the largest file of the newest checkpoint."""
        root = self._folder / self._contender.checkpoints
        files = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 64]
        # Those of the newest folder, by the number in its name, or simply the newest.
        newest = max((path.stat().st_mtime for path in files), default=0.0)
        recent = [path for path in files if path.stat().st_mtime > newest - 0.2]
        if not recent:
            return
        path = max(recent, key=lambda item: item.stat().st_size)
        data = bytearray(path.read_bytes())
        if is_flip:
            data[random.Random(len(data)).randrange(len(data))] ^= 1
            path.write_bytes(data)
        else:
            path.write_bytes(data[: len(data) // 2])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
