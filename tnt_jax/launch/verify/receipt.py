"""The receipt of a verification: what was run, what differed, and what later runs compare with."""

import hashlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tnt_jax.launch.scale.scaling import Scaling, read_results
from tnt_jax.launch.verify.comparison import Difference, Recording, Rounding, compare

_FORMAT = 1


@dataclass(frozen=True)
class Check:
    """A run of the script, and how it compares with the reference.

    Attributes:
        name: The run in words, such as `"4 ranks"`.
        because: Why it has not run; empty if it has.
        has_failed: Whether the run failed, rather than being left out.
        difference: Where it first differs by more than rounding; None if it does not.
        largest: Largest difference of an update from that of the reference, relative to it.
        has_equal_bits: Whether all arrays have the same bits after every step.
    """

    name: str
    because: str = ""
    has_failed: bool = False
    difference: Difference | None = None
    largest: float = 0.0
    has_equal_bits: bool = False

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
    """What a verification has found.

    Attributes:
        checksum: Of the script, SHA-256; empty for a module.
        commit: Of the folder that holds the script, by git, and whether files differ from it; None
            outside of a repository.
        reference: The run that others are compared with.
        rounded: The same from weights that are changed by rounding errors.
        scaling: Speed and efficiency, if they were measured.
    """

    script: Sequence[str]
    checksum: str
    commit: str | None
    reference: Recording
    rounded: Recording | None
    checks: Sequence[Check]
    scaling: Scaling | None = None

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
    """Returns what differs between two receipts besides results, and where training does.

    What rounding explains is that of the one with the coarser numbers.
    """
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
