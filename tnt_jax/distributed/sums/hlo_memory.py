"""Reads from a compiled program which arrays it holds when it holds most, and what made them."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from tnt_jax.distributed.sums import hlo

# Operations whose results lie where their operands do.
_VIEWS = ("bitcast", "get-tuple-element", "tuple", "while", "opt-barrier", "copy-done")
_LIBRARIES = tuple(
    str(Path(x).parents[up]) + os.sep for x, up in ((jax.__file__, 1), (__file__, 2))
)
_UNITS = ("B", "KiB", "MiB", "GiB")


class HeldArray(NamedTuple):
    """An array that a program holds.

    Attributes:
        nbytes: Its bytes.
        shape: Dtype and dimensions, such as `f32[8,16]`.
        origin: The operation that made it, by the names of modules, or the operand that it is.
        line: File and line that called it, outside of libraries; empty if it is not known.
    """

    nbytes: int
    shape: str
    origin: str
    line: str

    def __str__(self) -> str:
        made_by = ", ".join(filter(None, (self.origin, self.line)))
        return f"{self.shape} {in_units(self.nbytes)} ({made_by})"


def largest_arrays(text: str, count: int = 3) -> list[HeldArray]:
    """Returns the largest arrays that a scheduled program holds when it holds most."""
    lines = _Lines(text)
    _, held = _most_held(lines, hlo.split_computations(text), "")
    return sorted(held, key=lambda x: -x.nbytes)[:count]


def _most_held(
    lines: "_Lines", computations: dict[str, list[str]], name: str
) -> tuple[int, list[HeldArray]]:
    """Returns the most bytes that a program, or a loop body, holds, and the arrays."""
    parsed = [x for x in map(hlo.parse_instruction, computations[name]) if x is not None]
    made = {own: index for index, (own, *_) in enumerate(parsed)}
    roots: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for index, (own, _, operation, rest) in enumerate(parsed):
        read = [x for x in re.findall(r"%([\w.\-]+)", rest.split("), ")[0]) if x in made]
        sources = {root for x in read for root in roots[x]}
        roots[own] = sources if operation in _VIEWS else {own}
        for root in sources:
            last[root] = index
    # What a loop's body returns takes the place of what it is given.
    carried = roots[parsed[-1][0]] if name else set()
    now, most, best = 0, -1, []
    alive: dict[str, HeldArray] = {}
    for index, (own, shape, operation, rest) in enumerate(parsed):
        is_array = roots[own] == {own} and operation != "constant"
        if is_array and own not in carried and not (name and operation == "parameter"):
            alive[own] = lines.array(shape, rest)
            now += alive[own].nbytes
        called = hlo.called_computations(operation, rest) if operation in hlo.RUNS else []
        inner = (_most_held(lines, computations, x) for x in called)
        nbytes, arrays = max(inner, key=lambda x: x[0], default=(0, []))
        if now + nbytes > most:
            most, best = now + nbytes, [*alive.values(), *arrays]
        ended = [x for x in alive if last.get(x, index) <= index]
        for root in ended:
            if parsed[made[root]][2] != "parameter":
                now -= alive.pop(root).nbytes
    return most, best


class _Lines:
    """The tables of source lines in the head of a program."""

    def __init__(self, text: str) -> None:
        self._names = dict(_numbered(text, "FileNames", r'"(.*)"'))
        self._places = dict(_numbered(text, "FileLocations", r"\{(.*)\}"))
        self._frames = dict(_numbered(text, "StackFrames", r"\{(.*)\}"))

    def array(self, shape: str, rest: str) -> HeldArray:
        arrays = re.findall(r"\w+\[[\d,]*\]", shape)
        most = max(map(hlo.num_shape_bytes, arrays), default=0)
        plain = " and ".join(x for x in arrays if hlo.num_shape_bytes(x) * 10 >= most)
        name = re.search(r'op_name="([^"]*)"', rest)
        origin = name[1].split(";")[0].replace("\\'", "'") if name else ""
        origin = re.sub(r"^jit\(\w+\)/(shard_map/)?", "", origin)
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        line = self._line(int(frame[1])) if frame else ""
        # JAX 0.10 states the innermost line of the user, or of Flax, with the instruction.
        stated = re.search(r'source_file="([^"]*)" source_line=(\d+)', rest)
        line = line or (f"{os.path.basename(stated[1])}:{stated[2]}" if stated else "")
        return HeldArray(hlo.num_shape_bytes(shape), plain, origin, line)

    def _line(self, frame: int) -> str:
        """Returns the innermost line of a stack that no library has; else the innermost one."""
        innermost = ""
        while frame in self._frames:
            fields = _numbers(self._frames[frame])
            place = _numbers(self._places[fields["file_location_id"]])
            file = self._names[place["file_name_id"]]
            line = f"{os.path.basename(file)}:{place['line']}"
            if not file.startswith(_LIBRARIES):
                return line
            innermost = innermost or line
            # One more than the number of the frame that called; the first has none.
            frame = min(fields.get("parent_frame_id", 0), frame) - 1
        return innermost


def _numbers(entry: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", entry)}


def _numbered(text: str, title: str, pattern: str) -> Iterator[tuple[int, str]]:
    table = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, flags=re.MULTILINE)
    for number, entry in re.findall(
        rf"^(\d+) {pattern}$", table[1] if table else "", flags=re.MULTILINE
    ):
        yield int(number), entry


def in_units(nbytes: float) -> str:
    """Returns bytes in a unit that suits them.

    >>> in_units(3 * 2**20)
    '3.0 MiB'
    """
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"
