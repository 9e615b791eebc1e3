"""Trains a script's first steps several times, and says where the results differ.

The receipt of a verification holds what was run, what differed, and what later runs compare with.
"""

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tnt_jax.launch.planning.options import Options, Scale, Verify
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.scale.scaling import Scaling, read_results
from tnt_jax.launch.trials import Trials, choose_layouts, marked, take_turns, write_results
from tnt_jax.launch.verify.comparison import (
    Difference,
    Recording,
    Rounding,
    compare,
    have_equal_bits,
    largest_difference,
    read_lines,
)
from tnt_jax.settings import RECORD_MARK
from tnt_jax.settings import Recording as Kind

_FORMAT = 1
_IS_RECORD = marked(RECORD_MARK)
_WANTED = "a call of fit, or of a distributed step, that trains"


@dataclass(frozen=True)
class Check:
    """A run of the script, and how it compares with the reference."""

    name: str  # The run in words, such as `"4 ranks"`.
    because: str = ""  # Why it has not run; empty if it has.
    has_failed: bool = False  # Whether the run failed, rather than being left out.
    difference: Difference | None = None  # Where it first differs by more than rounding.
    largest: float = 0.0  # Largest difference of an update from that of the reference, relative.
    has_equal_bits: bool = False  # Whether all arrays have the same bits after every step.

    @property
    def is_good(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.has_failed and self.difference is None

    def lines(self) -> list[str]:
        """Returns the result in words."""
        if self.because:
            return [f"{self.name}: {'FAILED' if self.has_failed else 'left out'}. {self.because}"]
        if self.difference is None:
            how = f"the same; updates differ by {self.largest:.1e} at most"
            return [f"{self.name}: {'the same bits' if self.has_equal_bits else how}"]
        first, *causes = describe(self.difference)
        return [f"{self.name}: DIFFERS. {first}", *(f"  {cause}" for cause in causes)]


def describe(difference: Difference) -> list[str]:
    """Returns a difference in lines of words."""
    causes = [f"Likely: {cause}" for cause in difference.causes] or ["No likely cause is known."]
    return [f"First at {difference.where}: {difference.text}", *causes]


@dataclass(frozen=True, repr=False)
class Receipt:
    """What a verification has found."""

    script: Sequence[str]
    checksum: str  # Of the script, SHA-256; empty for a module.
    # Of the folder that holds the script, by git, and whether files differ from it; None outside of
    # a repository.
    commit: str | None
    reference: Recording  # The run that others are compared with.
    rounded: Recording | None  # The same from weights that are changed by rounding errors.
    checks: Sequence[Check]
    scaling: Scaling | None = None  # Speed and efficiency, if they were measured.

    @property
    def is_good(self) -> bool:
        """Whether nothing differs by more than rounding, and no run has failed."""
        return all(check.is_good for check in self.checks)

    def __repr__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """What was found, in words."""
        facts, steps = self.reference.facts, counted(len(self.reference.steps), "step")
        lines = [
            f"{self.script[0]}: {steps} by {facts['trained_by']}, "
            f"compared with {counted(self.reference.ranks, 'rank')} on {facts['device']}",
            *(line for check in self.checks for line in check.lines()),
        ]
        if self.scaling is not None:
            lines.append(self.scaling.table)
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns everything as text that `from_json` reads."""
        kept = {
            "format": _FORMAT,
            "script": list(self.script),
            "checksum": self.checksum,
            "commit": self.commit,
            "checks": [
                asdict(check) | {"difference": check.difference and check.difference._asdict()}
                for check in self.checks
            ],
            "scaling": self.scaling and json.loads(self.scaling.to_json()),
            "reference": self.reference.to_dict(),
            "rounded": self.rounded and self.rounded.to_dict(),
        }
        return json.dumps(kept, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Receipt":
        """Returns what `to_json` made text of; a ValueError says that it is something else."""
        kept = read_results(text, "verify", _FORMAT, "checks")
        return cls(
            kept["script"],
            kept["checksum"],
            kept["commit"],
            Recording.from_dict(kept["reference"]),
            kept["rounded"] and Recording.from_dict(kept["rounded"]),
            [
                Check(**check | {"difference": found and Difference(**found)})
                for check in kept["checks"]
                for found in [check["difference"]]
            ],
            kept["scaling"] and Scaling.from_json(json.dumps(kept["scaling"])),
        )


def read_receipt(path: str) -> Receipt:
    """Returns the receipt in a file; a ValueError says that it holds none, or cannot be read."""
    try:
        return Receipt.from_json(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"The receipt cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no receipt of tnt-jax verify that can be read: {error}"
        ) from None


def compare_receipts(ours: Receipt, theirs: Receipt) -> tuple[list[str], Difference | None]:
    """Returns what differs between two receipts besides results, and where training does."""
    # What rounding explains is that of the one with the coarser numbers.
    coarser = max(ours, theirs, key=lambda receipt: receipt.reference.facts["unit"])
    rounding = Rounding(coarser.reference, coarser.rounded)
    pairs = {
        "script": (" ".join(theirs.script), " ".join(ours.script)),
        "checksum of the script": (theirs.checksum[:12], ours.checksum[:12]),
        "commit": (theirs.commit, ours.commit),
    }
    there, here = theirs.reference.facts, ours.reference.facts
    pairs |= {name: (there[name], here[name]) for name in ("device", "ranks")}
    before, after = there["versions"], here["versions"]
    pairs |= {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    notes = [f"{name}: {old} there, {new} here" for name, (old, new) in pairs.items() if old != new]
    return notes, compare(theirs.reference, ours.reference, rounding)


def checksum_of(script: str) -> str:
    """Returns the SHA-256 of a script; empty for a module."""
    path = Path(script)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def commit_of(script: str) -> str | None:
    """Returns the commit of the folder of a script, by git; None if there is none."""
    folder = Path(script).resolve().parent

    def git(*words: str) -> str | None:
        try:
            command = ["git", "-C", str(folder), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    is_changed = commit and git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes" if is_changed else commit


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `"4 ranks"`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def run_verify(options: Options, verify: Verify, environ: Mapping[str, str]) -> int:
    """Runs the script several times, prints what was found, and writes a receipt if asked to.

    Returns the exit code: 0 if all results are the same up to rounding, 1 if one differs or a run
    failed. Raises `Stopped` after a signal.
    """
    theirs = None if verify.against is None else read_receipt(verify.against)
    if verify.receipt is not None:
        _check_file(Path(verify.receipt))
    layouts = choose_layouts(options, verify.ranks, environ)
    trials = Trials(layouts, options, environ, verify.run_timeout_s, _WANTED)
    if options.dry_run:
        for ranks in verify.ranks:
            trials.run(ranks, _IS_RECORD, recording=("plain", verify.steps))
        return 0
    hosts = max((len(layout.entries) for layout in layouts.values()), default=2)
    with _scratch(verify, hosts) as folder:
        receipt = _verified(trials, verify, folder)
    if receipt is None:
        return 1
    if verify.rounds:
        receipt = replace(receipt, scaling=_measured(trials, verify))
    print(receipt.text, flush=True)
    code = int(not receipt.is_good)
    if verify.receipt is not None:
        files = {Path(verify.receipt): lambda: receipt.to_json() + "\n"}
        code = max(code, int(not write_results(files, what="receipt")))
    return code if theirs is None else max(code, print_comparison(receipt, theirs))


def _check_file(path: Path) -> None:
    """Raises a ValueError unless a receipt can be written there without replacing a file."""
    if path.exists() or path.is_symlink():
        raise ValueError(f"--receipt {path} exists already, and is kept. Name another.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"--receipt {path} cannot be written: {path.parent} is no folder that can be written "
            "to. Name another."
        )


def verify_receipts(paths: Sequence[str]) -> int:
    """Prints what differs between two receipts; returns 1 if the training does, else 0."""
    if len(paths) != 2:
        raise ValueError(
            "tnt-jax verify compares two receipts without running anything; to compare one with "
            f"this machine, name the script: tnt-jax verify --against {paths[0]} -- train.py"
        )
    first, second = map(read_receipt, paths)
    return print_comparison(second, first)


def print_comparison(ours: Receipt, theirs: Receipt) -> int:
    """Prints what differs from another receipt; returns 1 if the training does, else 0."""
    notes, difference = compare_receipts(ours, theirs)
    for note in notes:
        print(f"Other {note}")
    found = ["The training is the same up to rounding."]
    print("\n".join(found if difference is None else describe(difference)), flush=True)
    return int(difference is not None)


def _scratch(verify: Verify, num_hosts: int) -> AbstractContextManager[str | None]:
    """Returns a folder for the run that is resumed; None if no folder is known that all see."""
    if verify.scratch is None and num_hosts > 1:
        return nullcontext()
    try:
        return tempfile.TemporaryDirectory(prefix="tnt-jax-verify-", dir=verify.scratch)
    except OSError as error:
        raise ValueError(
            f"No folder can be made for the run that is resumed: {error}. Name another place by "
            "--scratch."
        ) from None


def _verified(trials: Trials, verify: Verify, folder: str | None) -> Receipt | None:
    """Returns what all runs of the script have given; None if the first has not run."""
    steps, lowest, highest = verify.steps, verify.ranks[0], verify.ranks[-1]
    on_lowest = counted(lowest, "rank")
    reference = _record(trials, on_lowest, lowest, "plain", steps)
    if reference.failure:
        say(f"error: nothing was compared: {reference.failure}")
        return None
    name = f"{on_lowest} again, from weights changed by rounding errors"
    recorded = _record(trials, name, lowest, "rounded", steps)
    checks = [_checked(name, reference, recorded, Rounding(reference, recorded))]
    rounded = recorded if checks[0].is_good else None
    rounding = Rounding(reference, rounded)
    runs: list[tuple[str, int, Kind]] = [
        *((counted(number, "rank"), number, "plain") for number in verify.ranks[1:]),
        (f"{on_lowest}, rows in two passes", lowest, "passes"),
        (f"{counted(highest, 'rank')}, optimizer state sharded", highest, "sharded"),
    ]
    for name, ranks, kind in runs if highest > 1 else runs[:-1]:
        recorded = _record(trials, name, ranks, kind, steps)
        checks.append(_checked(name, reference, recorded, rounding))
    checks += _with_a_fault(trials, verify, folder, reference, rounding)
    options = trials.options
    return Receipt(
        [options.script_name, *options.script_args[options.script == "-m" :]],
        checksum_of(options.script_name),
        commit_of(options.script_name),
        reference,
        rounded,
        checks,
    )


def _with_a_fault(
    trials: Trials, verify: Verify, folder: str | None, reference: Recording, rounding: Rounding
) -> list[Check]:
    """Lets all processes be killed in the middle, and a run on the lowest number of ranks go on."""
    lowest, highest = verify.ranks[0], verify.ranks[-1]
    on_highest = counted(highest, "rank")
    half = max(verify.steps // 2, 1)
    name = f"{on_highest} killed after {half} steps, resumed on {lowest}"
    if folder is None:
        return [Check(name, "The hosts need a folder that all of them see: --scratch DIR.")]
    if (known := len(reference.steps)) <= half:
        return [Check(name, f"Training ends after {counted(known, 'step')}; see --steps.")]
    killed = f"{on_highest}, killed on purpose after {counted(half, 'step')}"
    steps = verify.steps
    recorded = _record(trials, killed, highest, "killed", steps, checkpoint_dir=folder)
    if recorded.left_out:
        return [Check(name, recorded.left_out)]
    if len(recorded.steps) != half:
        return [Check(name, recorded.failure or "It has ended before.", has_failed=True)]
    if (difference := compare(reference, recorded, rounding)) is not None:
        return [Check(name, difference=difference)]
    resumed = f"The same, resumed on {counted(lowest, 'rank')}"
    saved, steps = recorded.steps[-1], verify.steps - half
    recorded = _record(trials, resumed, lowest, "resumed", steps, checkpoint_dir=folder)
    if (start := recorded.start) and start.step != saved.step:
        because = f"It goes on after step {start.step}, but was killed after step {saved.step}."
        return [Check(name, because, has_failed=True)]
    return [_checked(name, reference, recorded, rounding)]


def _checked(name: str, reference: Recording, recorded: Recording, rounding: Rounding) -> Check:
    if recorded.failure:
        return Check(name, recorded.failure, has_failed=True)
    if recorded.left_out:
        return Check(name, recorded.left_out)
    return Check(
        name,
        difference=compare(reference, recorded, rounding),
        largest=largest_difference(reference, recorded),
        has_equal_bits=have_equal_bits(reference, recorded),
    )


def _record(
    trials: Trials, name: str, ranks: int, kind: Kind, steps: int, **changes: str
) -> Recording:
    say(f"{name}.")
    try:
        report = trials.run(ranks, _IS_RECORD, recording=(kind, steps), **changes)
    except (HostError, OSError) as error:
        return Recording(failure=str(error))
    # Of processes that end as by a kill, one may see that another has gone.
    if report.because and not (kind == "killed" and report.lines):
        return Recording(failure=report.because)
    recording = read_lines(report.lines)
    return replace(recording, facts={**recording.facts, "as": kind})


def _measured(trials: Trials, verify: Verify) -> Scaling | None:
    scale = Scale(verify.ranks, rounds=verify.rounds)
    options = replace(trials.options, verify=None, scale=scale)
    wanted = "a call of fit: the speed of a custom training loop is not measured"
    runs, failures = take_turns(replace(trials, options=options, wanted=wanted), scale)
    return Scaling(options.script_name, False, runs, failures) if runs else None
