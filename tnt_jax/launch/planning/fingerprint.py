"""Fingerprint files, and `tnt-jax fingerprint A B`, which finds where two runs diverge.

A fingerprint file has one JSON object per line, `{"epoch": 0, "step": 20, "arrays":
{"params/Dense_0/bias": "9a0364b9..."}}`, with a digest of each array of the training state after
`step` steps. `tnt_jax.callbacks.Fingerprint` writes it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NAMED_ARRAYS = 8


def fingerprint_line(epoch: int, step: int, arrays: Mapping[str, str]) -> str:
    """Returns the line of a fingerprint file for digests of arrays by path after `step` steps."""
    return json.dumps({"epoch": epoch, "step": step, "arrays": dict(arrays)}) + "\n"


def first_difference(path: str | Path, other: str | Path) -> str | None:
    """Returns where two fingerprint files first differ, or None if they are equal.

    Only steps that both files have are compared, so that one of the runs may have been resumed.
    """
    ours, theirs = _read(path), _read(other)
    common = [step for step in ours if step in theirs]
    if not common:
        raise ValueError(
            f"{path} and {other} have no step in common: {_steps(ours)} and {_steps(theirs)}."
        )
    for step in sorted(common):
        left, right = ours[step]["arrays"], theirs[step]["arrays"]
        names = [name for name in left | right if left.get(name) != right.get(name)]
        if names or ours[step]["epoch"] != theirs[step]["epoch"]:
            more = f" and {len(names) - _NAMED_ARRAYS} more" if len(names) > _NAMED_ARRAYS else ""
            what = f"{', '.join(names[:_NAMED_ARRAYS])}{more}" if names else "the epoch"
            return f"step {step} (epoch {ours[step]['epoch'] + 1}): {what}"
    return None


def fingerprint(words: Sequence[str]) -> int:
    """Runs `tnt-jax fingerprint A B`: prints the first difference and returns 1, or returns 0."""
    if len(words) != 2:
        raise ValueError(
            f"tnt-jax fingerprint compares two files, but got {len(words)}: "
            f"{' '.join(words) or 'none'}."
        )
    difference = first_difference(*words)
    print("equal" if difference is None else f"first difference at {difference}")
    return 0 if difference is None else 1


def _read(path: str | Path) -> dict[int, dict[str, Any]]:
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            records[record["step"]] = {"epoch": record["epoch"], "arrays": dict(record["arrays"])}
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}, is not a line of a fingerprint file: {line[:80]!r}."
            ) from error
    return records


def _steps(records: Mapping[int, Any]) -> str:
    return f"steps {min(records)} to {max(records)}" if records else "none"
