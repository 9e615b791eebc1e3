"""The contenders of `benchmarks/faults.py`: how each starts its job, and what runs of it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

JOBS = Path(__file__).parent / "fault_jobs"
STALL_S = 8
"""Seconds after which a process without progress is given up, where a contender can be told so."""
CODE_PREEMPTED = 75
_LEFT_S = 15.0
STOP = threading.Event()
"""Set to end all running jobs, and the series with them."""
TNT_JAX = {"TNT_STALL_TIMEOUT": str(STALL_S), "TNT_STALL_WARNING_S": "5"}

Command = tuple[Sequence[str], Mapping[str, str]]


@dataclass(frozen=True)
class Contender:
    """How a job is started.

    Attributes:
        script: The training script.
        commands: From the folder of a job, the number of its processes, and how often the launcher
            may start it again, to the commands that start it.
        checkpoints: Where its checkpoints lie in that folder.
        partial: Pattern of the files and folders there that are being written.
        named: Regular expression that finds the number of the process that its messages blame.
    """

    script: str
    commands: Callable[[Path, int, int], list[Command]]
    checkpoints: str
    partial: str
    named: str


def tnt_jax_words(folder: Path, checkpoints: Path | None = None) -> list[str]:
    """Returns the end of the command of a job: where and when it saves, and its script."""
    words = ["--checkpoint-dir", str(checkpoints or folder / "disk" / "run")]
    return [*words, "--checkpoint-every", "5", "--", str(JOBS / "train_tnt.py"), str(folder)]


def _tnt_jax(folder: Path, num_processes: int, restarts: int) -> list[Command]:
    words = ["-n", str(num_processes), "--no-gpu", "--max-restarts", str(restarts)]
    return [([sys.executable, "-m", "tnt_jax.launch", *words, *tnt_jax_words(folder)], TNT_JAX)]


def _pytorch(folder: Path, num_processes: int, restarts: int) -> list[Command]:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    # With the static rendezvous, its default, a restarted worker connects to its dead predecessor.
    words += ["--standalone", "--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    return [
        (
            [sys.executable, *words, str(JOBS / "train_ddp.py"), str(folder)],
            {"OMP_NUM_THREADS": "1"},
        )
    ]


def _keras(folder: Path, num_processes: int, restarts: int) -> list[Command]:
    address = f"127.0.0.1:{free_port()}"
    return [
        (
            [sys.executable, str(JOBS / "train_keras.py"), str(folder)],
            {"COORDINATOR": address, "WORLD_SIZE": str(num_processes), "RANK": str(rank)},
        )
        for rank in range(num_processes)
    ]


CONTENDERS = {
    "tnt_jax": Contender(
        "train_tnt.py", _tnt_jax, "disk/run", "**/*.orbax-checkpoint-tmp",
        r"Process (\d+) has (?:not posted|made no progress)|Process (\d+), which coordinates"
        r"|Process (\d+) has (?:left|ended)|Rank (\d+) on|came to process (\d+)"
        r"|Process (\d+) is slower",
    ),
    "pytorch": Contender(
        "train_ddp.py", _pytorch, "disk", "*.new", r"failed \(exitcode: \S+\) local_rank: (\d+)"
    ),
    "keras": Contender(
        "train_keras.py", _keras, "disk", "**/*.new", r"\btask:(\d+)|process_id=(\d+)"
    ),
}  # fmt: skip


def job_environment(folder: Path, extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Returns the environment of a job, with a compilation cache that all jobs share."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TNT_")}
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **extra,
    }


class Stopped(Exception):
    """Raised where a job is watched when the series is to end."""


class RunningJob:
    """The processes of one start of a job.

    Args:
        contender: Whose job it is.
        folder: Folder of the job.
        num_processes: Number of its processes.
        restarts: How often its launcher may start it again.
        commands: What starts it; None for the contender's own commands.

    Attributes:
        lines: What it has printed, with the time of each line.
        ended_at: When its last process ended; None while one runs.
        left: Whether processes of it were left when the started ones had ended, and did not end
            within seconds.
    """

    def __init__(
        self,
        contender: Contender,
        folder: Path,
        num_processes: int = 2,
        *,
        restarts: int = 1,
        commands: Sequence[Command] | None = None,
    ) -> None:
        self._contender, self._folder = contender, folder
        self.lines: list[tuple[float, str]] = []
        self.ended_at: float | None = None
        self.left = False
        self._started = [
            subprocess.Popen(
                command, env=job_environment(folder, extra), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True, cwd=folder,
            )
            for command, extra in commands or contender.commands(folder, num_processes, restarts)
        ]  # fmt: skip
        self._readers = [
            threading.Thread(target=self._read, args=(popen,), daemon=True)
            for popen in self._started
        ]
        for reader in self._readers:
            reader.start()

    def poll(self) -> list[int] | None:
        """Returns the exit codes of what was started once all of it has ended.

        Raises:
            Stopped: If `STOP` is set.
        """
        if STOP.is_set():
            raise Stopped
        codes = [code for popen in self._started if (code := popen.poll()) is not None]
        if len(codes) < len(self._started):
            return None
        self.ended_at = self.ended_at or time.time()
        return codes

    def first_end(self) -> bool:
        """Returns whether one of the started processes has ended."""
        return any(popen.poll() is not None for popen in self._started)

    def send(self, signum: int, process: int | None) -> None:
        """Sends a signal to a process of the job; to the launcher if `process` is None."""
        targets = (
            [popen.pid for popen in self._started] if process is None else [self.worker(process)]
        )
        for pid in targets:
            os.kill(pid, signum)

    def worker(self, process: int) -> int:
        """Returns the id of a process of the job.

        Raises:
            ProcessLookupError: If it does not run.
        """
        found = self.workers()
        if process not in found:
            raise ProcessLookupError(f"Process {process} of {self._folder} does not run.")
        return found[process]

    def workers(self) -> dict[int, int]:
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
            script, folder = self._contender.script.encode(), str(self._folder).encode()
            is_ours = words[-2:] == [folder, b""] and words[-3].endswith(script)
            rank = environ.get(b"TNT_PROCESS_ID", environ.get(b"RANK"))
            if is_ours and rank:
                found[int(rank)] = int(entry.name)
        return found

    def await_rest(self) -> None:
        """Waits, once the started processes have ended, for those that they had started."""
        deadline = time.monotonic() + _LEFT_S
        while self.workers():
            if time.monotonic() > deadline:
                self.left = True
                break
            time.sleep(0.05)
        self.end()

    def end(self) -> None:
        """Ends what is left of it."""
        for pid in [*self.workers().values(), *(popen.pid for popen in self._started)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # It has ended.
                continue
        for popen in self._started:
            popen.wait()
        for reader in self._readers:
            reader.join(5.0)

    def _read(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        with open(self._folder / "output", "a") as file:
            for raw in popen.stdout:
                line = raw.decode(errors="replace")
                now = time.time()
                self.lines.append((now, line))
                file.write(f"{now:.3f} {line}")
                file.flush()


def free_port() -> int:
    """Returns a port of this host that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
