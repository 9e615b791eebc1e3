"""Reads records of `benchmarks/faults.py`, and shows them as tables."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fault_kinds import KINDS

Record = Mapping[str, Any]

MARKS = ("<!-- faults: begin -->", "<!-- faults: end -->")
"""Between these lines of a page, tables are replaced."""
_ROWS = ("lost", "doubled")
_ONE_DIFFERS = {
    "weights": "other weights", "data": "other data", "stop_training": "`stop_training`",
}  # fmt: skip
_NAMES = {"tnt_jax": "tnt_jax", "pytorch": "PyTorch, torchrun", "keras": "Keras 3 on JAX"}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the trials of a record; none if the file is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def compact(record: Record, wrong: str) -> dict[str, Any]:
    """Returns what is kept of a trial: of one that went right, no output and no digest."""
    is_plain = not wrong and record.get("named") is not False
    dropped = {"digest", "told"} if is_plain else set[str]()
    return {name: value for name, value in record.items() if name not in dropped}


def insert(text: str, page: Path, marks: tuple[str, str] = MARKS) -> None:
    """Replaces what a page has between two marks.

    Raises:
        ValueError: If the page has no marks.
    """
    before, begin, rest = page.read_text().partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"{page} needs lines {marks[0]} and {marks[1]}, between which tables go.")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def tables(records: Sequence[Record]) -> str:
    """Returns a table of the first contender's trials, and one of all contenders.

    Between them stands how busy the machine was, and which trials were set aside: those whose
    record has a reason under `void`.
    """
    counted = [record for record in records if not record.get("void")]
    ours = [record for record in counted if record["contender"] == "tnt_jax"]
    aside = [
        f"- Set aside, and repeated: {record['kind']} ({record['wrong']}). {record['void']}"
        for record in records
        if record.get("void")
    ]
    load = spread(record["load"] for record in ours)
    about = (
        f"- Load of the machine, which has two cores, after the trials: {load}; the median first."
    )
    return "\n\n".join([table(ours), "\n".join([about, *aside]), comparison(counted)])


def table(records: Sequence[Record]) -> str:
    """Returns a row for each fault and whom it happens to, over all phases, and one of the sums."""
    lines = [
        "| fault | trials | hung | rows lost | rows doubled | other weights | otherwise wrong | "
        "named | noticed, s | next step, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for title, some in _by(records, _title).items():
        lines.append(_row(title, some))
    lines.append(_row("**all**", records))
    return "\n".join(lines)


def comparison(records: Sequence[Record]) -> str:
    """Returns a row for each fault that a peer was given, with what went wrong in the trials."""
    contenders = [name for name in _NAMES if any(item["contender"] == name for item in records)]
    lines = [
        f"| fault | {' | '.join(_NAMES[name] for name in contenders)} |",
        "| --- |" + " --- |" * len(contenders),
    ]
    for title, some in _by(records, _title).items():
        given = {item["kind"] for item in some if item["contender"] != "tnt_jax"}
        compared = [item for item in some if item["kind"] in given]
        if compared:
            of_each = (
                [item for item in compared if item["contender"] == name] for name in contenders
            )
            lines.append(f"| {title} | {' | '.join(map(_outcomes, of_each))} |")
    return "\n".join(lines)


def _title(record: Record) -> str:
    kind = KINDS[record["kind"]]
    if kind.family == "differs":
        return f"{_ONE_DIFFERS.get(kind.fault, f'another {kind.fault}')} on one process"
    return f"{kind.fault}: {kind.target}" if kind.target else kind.fault


def _by(records: Iterable[Record], title: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Returns records by title, in the order of the kinds."""
    order = {name: number for number, name in enumerate(KINDS)}
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda item: order[item["kind"]]):
        groups.setdefault(title(record), []).append(record)
    return groups


def _row(title: str, some: Sequence[Record]) -> str:
    wrong = Counter(item["wrong"] for item in some if item["wrong"])
    others = {"hung", "other weights", "rows lost or doubled"}
    asked = [item["named"] for item in some if item.get("named") is not None]
    cells = [
        len(some),
        wrong["hung"],
        sum(item["lost"] or 0 for item in some if _is_to_go_on(item)),
        sum(item["doubled"] or 0 for item in some if _is_to_go_on(item)),
        wrong["other weights"],
        sum(number for word, number in wrong.items() if word not in others),
        f"{sum(asked)} of {len(asked)}" if asked else "",
        spread(item.get("noticed_s") for item in some),
        spread(item.get("back_s") for item in some),
    ]
    return f"| {title} | {' | '.join(map(str, cells))} |"


def _is_to_go_on(record: Record) -> bool:
    """Returns whether all rows are to be trained on, which is not so if one process stops all."""
    return KINDS[record["kind"]].promise != "ends"


def _outcomes(some: Sequence[Record]) -> str:
    wrong = Counter(item["wrong"] for item in some if item["wrong"])
    words = [f"{number} {word}" for word, number in wrong.most_common()]
    moved = [sum(item[name] or 0 for item in some if _is_to_go_on(item)) for name in _ROWS]
    rows = f" ({moved[0]} rows lost, {moved[1]} doubled)" if any(moved) else ""
    right = f"{len(some) - wrong.total()} of {len(some)} right" if some else ""
    return ", ".join([right, *words]) + rows


def spread(values: Iterable[float | None]) -> str:
    """Returns the median and the largest of the values that are known."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}, at most {max(known):.1f}" if known else ""
