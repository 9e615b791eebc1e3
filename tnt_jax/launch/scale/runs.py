"""What one run of a script on some number of ranks has measured, as it travels and is kept."""

import json
from dataclasses import MISSING, dataclass, fields
from typing import Any

from tnt_jax.launch.scale.projection import Outer

MARK = "tnt-jax scale: "
"""How the line begins in which the first process reports to its launcher what was measured."""


@dataclass(frozen=True)
class Shares:
    """Where the time of traced steps went, mean over the processes; together they make 1.

    Attributes:
        compute: Devices computed.
        communication: Devices only exchanged values, or waited for each other.
        data: Devices had nothing to do while the host waited for, or prepared, data.
        host: Devices had nothing to do for another reason.
    """

    compute: float
    communication: float
    data: float
    host: float


@dataclass(frozen=True)
class Run:
    """What one run of a script has measured.

    Attributes:
        round: Number of the round, from 0.
        device: Kind of the devices, as JAX names it.
        global_batch: Rows of a global batch.
        steps: Timed steps.
        rows: Real rows of all timed steps.
        seconds: What the timed steps took, on the slowest process.
        shares: Where the time of further steps went, by the profiler.
        compile_s: What tracing, lowering and compiling took, up to the first timed step.
        memory_bytes: Most memory of any process: that of its devices if they tell, else its own.
        memory_of: `"device"` or `"process"`.
        gradient_bytes: Gradients that the ranks sum in a step.
        outer: What groups of ranks exchange instead, with `LocalSteps`.
    """

    ranks: int
    round: int
    hosts: int
    processes: int
    device: str
    global_batch: int
    steps: int
    rows: int
    seconds: float
    shares: Shares
    compile_s: float
    memory_bytes: int
    memory_of: str
    gradient_bytes: int
    versions: dict[str, str]
    outer: Outer | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps

    @property
    def examples_per_s(self) -> float:
        """Real rows a second, of all ranks together."""
        return self.rows / self.seconds


def as_line(measured: dict[str, Any]) -> str:
    """Returns the line in which a process reports the fields of a `Run` but `round` and `hosts`."""
    return MARK + json.dumps(measured)


def read_line(line: str, *, round: int, hosts: int) -> Run:
    """Returns the run that a line of `as_line` reports."""
    return read_run(json.loads(line.removeprefix(MARK)) | {"round": round, "hosts": hosts})


def read_run(kept: dict[str, Any]) -> Run:
    """Returns a run from what `dataclasses.asdict` made of it.

    Raises:
        ValueError: If it is no run.
    """
    names = {field.name for field in fields(Run)}
    required = {field.name for field in fields(Run) if field.default is MISSING}
    if not isinstance(kept, dict) or not required <= set(kept) <= names:
        raise ValueError(f"A run must have {', '.join(sorted(required))}, but has {kept!r:.200}.")
    outer = kept.get("outer")
    shares = Shares(**kept["shares"])
    return Run(**{**kept, "shares": shares, "outer": outer and Outer(**outer)})


def read_results(text: str, command: str, format: int, key: str) -> dict[str, Any]:
    """Returns the results that a command of `tnt-jax` has written as JSON.

    Args:
        text: The JSON.
        command: Name of the command.
        format: Number of the format that is expected.
        key: A name that the results of no other command have.

    Raises:
        ValueError: If the text is something else.
    """
    results = json.loads(text)
    if not isinstance(results, dict) or key not in results:
        raise ValueError(f"The text is not that of tnt-jax {command}, format {format}.")
    if (found := results.get("format")) != format:
        raise ValueError(
            f"The text is that of tnt-jax {command}, but of format {found}. This version reads "
            f"format {format}: read it with the version that wrote it."
        )
    return results
