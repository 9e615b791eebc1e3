"""Compares settings of the processes: where they differ, all raise one error with both values."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tnt_jax.distributed.joining.runtime import get_process_count, get_process_index
from tnt_jax.distributed.liveness.rendezvous import listed, meet

# An error names so many settings and groups of processes, and quotes so much of a value.
_MOST_SETTINGS, _MOST_GROUPS, _QUOTED = 6, 4, 120
_NOTHING = "nothing"


def compare(call: str, values: Mapping[str, Any], *, advice: str) -> None:
    """Raises the same ValueError, with advice, on all processes unless all have the same values."""
    if get_process_count() == 1:
        return
    own = json.dumps({name: str(value) for name, value in values.items()}, sort_keys=True)
    digests = meet(call, hashlib.sha256(own.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    # They meet once more for the values, where one process speaks for all with the same ones: a
    # large job would exchange megabytes.
    speakers = sorted({digest: digests.index(digest) for digest in digests}.values())
    speakers = speakers[: 2 * _MOST_GROUPS]
    texts = meet(call, own if get_process_index() in speakers else "")
    groups = [
        [process for process, digest in enumerate(digests) if digest == digests[speaker]]
        for speaker in speakers
    ]
    told = [json.loads(texts[speaker]) for speaker in speakers]
    raise ValueError(
        f"{call} needs the same on every process, but {describe_differences(told, groups)}. "
        f"{advice} See docs/survival.md#processes-that-disagree."
    )


def describe_differences(
    told: Sequence[Mapping[str, str]],
    groups: Sequence[Sequence[int]] | None = None,
    *,
    whose: Sequence[str] | None = None,
) -> str:
    """Returns each value that differs, with the processes that have it; empty if none does.

    `told` are the values of each group of processes, by default of each process; `whose` is what
    follows a group's value instead of its processes, such as `"now"`.
    """
    members = [[process] for process in range(len(told))] if groups is None else groups
    names = dict.fromkeys(name for values in told for name in values)
    differing = [name for name in names if len({values.get(name, _NOTHING) for values in told}) > 1]
    listed = [
        f"{name}: {_by_value([values.get(name, _NOTHING) for values in told], members, whose)}"
        for name in differing[:_MOST_SETTINGS]
    ]
    if len(differing) > _MOST_SETTINGS:
        listed.append(f"and {len(differing) - _MOST_SETTINGS} more")
    return "; ".join(listed)


def _by_value(
    values: Sequence[str], members: Sequence[Sequence[int]], whose: Sequence[str] | None
) -> str:
    processes: dict[str, list[int]] = {}
    for value, group in zip(values, members, strict=True):
        processes.setdefault(value, []).extend(group)
    # What the first and the last of sorted texts begin with, all of them do.
    pairs = enumerate(zip(min(processes), max(processes), strict=False))
    start = next((index for index, (a, b) in pairs if a != b), len(min(processes)))
    parts = [
        f"{_excerpt(value, start)} "
        + (f"on {name_processes(sorted(group))}" if whose is None else whose[group[0]])
        for value, group in list(processes.items())[:_MOST_GROUPS]
    ]
    more = len(processes) - _MOST_GROUPS
    return ", ".join(parts) + (f", and {more} more values" if more > 0 else "")


def _excerpt(text: str, difference: int) -> str:
    """Returns a text, or the part of a long one in which it differs from others."""
    if len(text) <= _QUOTED:
        return text
    first = max(0, min(difference - _QUOTED // 4, len(text) - _QUOTED))
    end = first + _QUOTED
    return ("..." if first else "") + text[first:end] + ("..." if end < len(text) else "")


def name_processes(processes: Sequence[int]) -> str:
    """Returns process numbers in words, such as `"process 1"` or `"processes 0, 2"`."""
    return f"process{'es' if len(processes) > 1 else ''} {listed(processes)}"
