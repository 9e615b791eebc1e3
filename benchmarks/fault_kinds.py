"""The faults of `benchmarks/faults.py`: what happens, in which phase, to whom; what is promised.

Most of them disturb a job that goes on after each, one after the other (`fault_sequences.py`);
others need starts of their own (`fault_starts.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PHASES = ("training", "validation", "data", "compilation", "saving")
LAUNCHER, PROCESS = "the launcher", "a process"

Promise = Literal["goes on", "restarts", "is preempted", "is refused", "ends"]
Family = Literal["sequence", "differs", "changes", "other"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        fault: What happens.
        phase: What the processes do when it happens; empty where it has no phase.
        target: Whom it happens to; empty for none of them.
        action: What the process does itself (`fault_jobs/injected.py`), or `"outside"`.
        promise: What the job must do: go on by itself; start again from a checkpoint; save its
            state, end with code 75 and start again with the next step; refuse to train on all
            processes alike; end by itself.
        family: Which kind of job it needs.
        is_named: Whether the output must name the process.
        num_epochs: Epochs that it takes.
        contenders: Those whose jobs can be given it.
    """

    fault: str
    phase: str
    target: str
    action: str = "outside"
    promise: Promise = "restarts"
    family: Family = "sequence"
    is_named: bool = False
    num_epochs: int = 1
    contenders: tuple[str, ...] = ("tnt_jax", "pytorch", "keras")

    @property
    def name(self) -> str:
        """The kind in one line."""
        return " / ".join(word for word in (self.fault, self.phase, self.target) if word)


_OURS = ("tnt_jax",)


def _signals() -> Iterator[Kind]:
    for phase in PHASES:
        # The peers save in too short a time to meet them, and compile before the first epoch.
        peers = phase in ("training", "validation")
        contenders = Kind.contenders if peers else _OURS
        for target in (LAUNCHER, PROCESS):
            for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
                yield Kind(
                    name, phase, target, promise="is preempted", is_named=target == PROCESS,
                    contenders=contenders if name != "SIGUSR2" else _OURS,
                )  # fmt: skip
            yield Kind("SIGINT", phase, target, contenders=contenders)
            is_named = target == PROCESS
            yield Kind("kill -9", phase, target, is_named=is_named, contenders=contenders)
        yield Kind("SIGSTOP", phase, PROCESS, is_named=True, contenders=contenders)
    yield Kind("SIGSTOP for 3 s", "training", PROCESS, promise="goes on")
    yield Kind("SIGSTOP for 3 s", "training", LAUNCHER, promise="goes on")


def _inside() -> Iterator[Kind]:
    actions = {
        "exception": "exception",
        "MemoryError": "memory",
        "sys.exit(3)": "sys_exit",
        "os._exit(5)": "os_exit",
        "blocked": "stuck",
    }
    for name, action in actions.items():
        for phase in ("training", "validation", "data", "compilation"):
            contenders = _OURS if phase == "compilation" else Kind.contenders
            yield Kind(name, phase, PROCESS, action, is_named=True, contenders=contenders)
    yield Kind("SIGSEGV", "training", PROCESS, "segfault", is_named=True)
    yield Kind("slow", "training", PROCESS, "slow", "goes on", is_named=True, num_epochs=4)
    yield Kind("NaN in a row", "data", PROCESS, "nan")


def _files() -> Iterator[Kind]:
    for fault in ("flipped bit", "truncated file", "deleted file"):
        yield Kind(f"{fault} in the newest checkpoint, kill -9", "training", PROCESS)
    yield Kind("newest checkpoint deleted, kill -9", "training", PROCESS, contenders=_OURS)
    for fault in ("directory vanished", "disk full", "read-only disk"):
        contenders = _OURS if fault == "directory vanished" else Kind.contenders
        yield Kind(f"{fault}, kill -9", "training", PROCESS, num_epochs=2, contenders=_OURS)
        yield Kind(fault, "training", "", promise="goes on", num_epochs=3, contenders=contenders)


def _starts() -> Iterator[Kind]:
    for what in (
        "seed", "learning rate", "weights", "data", "batch size", "number of rows",
        "number of epochs",
    ):  # fmt: skip
        yield Kind(what, "", PROCESS, promise="is refused", family="differs", is_named=True)
    yield Kind("stop_training", "", PROCESS, promise="ends", family="differs")
    for what, promise in {
        "half the batch": "restarts",
        "a batch that does not fit": "is refused",
        "another seed": "is refused",
        "one process": "restarts",
        "three processes": "restarts",
    }.items():
        yield Kind(
            f"resume with {what}", "", "", promise=promise, family="changes", contenders=_OURS
        )  # pyright: ignore[reportArgumentType]
    for fault, promise in {
        "two jobs, one directory": "is refused",
        "wrong number of processes": "is refused",
        "two processes with one number": "is refused",
        "host cut off": "restarts",
        "host of the launcher cut off": "restarts",
    }.items():
        yield Kind(fault, "", "", promise=promise, family="other", contenders=_OURS)  # pyright: ignore[reportArgumentType]


KINDS = {kind.name: kind for kind in (*_signals(), *_inside(), *_files(), *_starts())}
