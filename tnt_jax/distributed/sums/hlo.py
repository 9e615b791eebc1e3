"""Reads from programs their collectives, and the arrays that a program holds when it holds most."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tnt_jax import _jax

# Of those dtypes that do not have 4.
_NUM_BYTES = {
    **dict.fromkeys(("f64", "s64", "u64"), 8),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("s8", "u8", "pred"), 1),
}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_SHAPES = r"\((tensor<[^)]*>)\) ->"
_TITLE = "// Program: "
_KERNELS = (
    "fusion custom-call dot convolution reduce copy sort scatter concatenate while call".split()
)
# The call that stands for an all-reduce in programs of CPU processes; see `_jax.replace_sums`.
_SHARED_SUM = re.compile(r'custom_call_target="tnt_jax_sum"')


class Collective(NamedTuple):
    """One collective of a schedule; positions are shares of the kernels, from 0 to 1.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all` or `collective-permute`.
        nbytes: Bytes of the whole arrays: those of the results, of a reduce-scatter those of the
            operands. Several arrays in one collective are summed.
        is_asynchronous: Whether other kernels are scheduled between its start and its end.
        start: Position of the start.
        done: Position of the end.
        backward_end: Position of the last kernel of backpropagation.
    """

    kind: str
    nbytes: int
    is_asynchronous: bool
    start: float
    done: float
    backward_end: float


class Traffic(NamedTuple):
    """One collective of a scheduled program, wherever it stands; otherwise as `Collective`.

    Attributes:
        dtypes: Dtypes of the result, such as `bf16`.
        times: How often a run of the program executes it, where the compiler knows; else 1.
        group_size: Devices that take part in it together; 0 where the program does not say.
    """

    kind: str
    nbytes: int
    dtypes: str
    is_asynchronous: bool
    times: int
    group_size: int = 0

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends each time, by a ring, which is optimal for large arrays.

        Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms, 2009.
        """
        if self.kind == "collective-permute":
            return self.nbytes
        others = (self.group_size - 1) / self.group_size if self.group_size else 1
        return (2 if self.kind == "all-reduce" else 1) * others * self.nbytes


def join_programs(texts: Mapping[str, str]) -> str:
    """Returns the texts of several programs as one, each after a comment with its name."""
    return "\n".join(f"{_TITLE}{name}\n{text}" for name, text in texts.items())


def split_programs(text: str) -> list[str]:
    """Returns the programs in a text of `join_programs`; another text is one program."""
    parts = text.split(_TITLE)
    return parts if len(parts) == 1 else [part.split("\n", 1)[1] for part in parts[1:]]


def read_planned(text: str) -> list[tuple[str, int]]:
    """Returns the kind and bytes of each collective in a program of StableHLO, in order."""
    names = "|".join(kind.replace("-", "_") for kind in _COLLECTIVES)
    found = re.findall(rf'"stablehlo\.({names})".*?{_SHAPES}', text, flags=re.DOTALL)
    return [(name.replace("_", "-"), _num_tensor_bytes(shapes)) for name, shapes in found]


def read_collectives(text: str, computation: str = "") -> tuple[list[Collective], int]:
    """Returns the collectives of a program, or a loop body, and the number of backward kernels."""
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError(
            "Only a scheduled program shows what overlaps: pass the text of a compiled program."
        )
    computations = _split_computations(text)
    found: list[tuple[str, str, int, bool, int]] = []
    # After how many kernels each start is done.
    ends: dict[str, int] = {}
    kernels = 0
    backward = []
    for name, shape, operation, rest in _instructions(computations[computation]):
        kind, groups = _kind(operation, rest, computations)
        if operation.endswith("-done"):
            if operand := re.search(r"%([\w.\-]+)\)", rest):
                ends[operand[1]] = kernels
        elif kind is not None:
            nbytes = _num_bytes(kind, operation, shape, groups)
            found.append((name, kind, nbytes, _is_asynchronous(operation, rest), kernels))
        elif operation in _KERNELS:
            kernels += 1
            if "transpose(jvp" in rest:
                backward.append(kernels)
    total = max(kernels, 1)
    last = max(backward, default=0) / total
    return [
        Collective(kind, size, is_async, start / total, ends.get(name, start) / total, last)
        for name, kind, size, is_async, start in found
    ], len(backward)


def read_traffic(text: str) -> list[Traffic]:
    """Returns the collectives of a compiled program's HLO, those in loops and branches included."""
    computations = _split_computations(text)
    # The devices that the program is compiled for, from its first line.
    counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", text.split("\n", 1)[0])
    num_devices = math.prod(map(int, counts))
    found = []
    for name, times in _runs(computations):
        for _, shape, operation, rest in _instructions(computations[name]):
            kind, groups = _kind(operation, rest, computations)
            if kind is None or operation.endswith("-done"):
                continue
            is_asynchronous = _is_asynchronous(operation, rest)
            dtypes = "+".join(sorted(set(re.findall(r"(\w+)\[", shape))))
            nbytes = _num_bytes(kind, operation, shape, groups)
            size = _group_size(groups, num_devices)
            found.append(Traffic(kind, nbytes, dtypes, is_asynchronous, times, size))
    return found


def sent_bytes(text: str) -> float:
    """Returns the bytes that a device sends in a run of a compiled program."""
    return sum(x.times * x.sent_bytes for x in read_traffic(text))


def count_runs(text: str) -> dict[str, int]:
    """Returns how often a compiled program runs each loop body and branch, by its name.

    The name of the program itself is ''. Loops whose length the compiler does not know count once.
    """
    runs: Counter[str] = Counter()
    for name, times in _runs(_split_computations(text)):
        runs[name] += times
    return runs


def _runs(
    computations: dict[str, list[str]], name: str = "", times: int = 1
) -> Iterator[tuple[str, int]]:
    yield name, times
    for _, _, operation, rest in _instructions(computations[name]):
        for called in _called(operation, rest):
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
            yield from _runs(computations, called, times * (int(trips[1]) if trips else 1))


def _called(operation: str, rest: str) -> list[str]:
    """Returns the computations that a loop, a branch or a call runs; none for other operations."""
    if operation == "conditional":
        branches = re.search(r"branch_computations=\{(.*?)\}", rest)
        if branches is None:
            return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", rest)
        return re.findall(r"%([\w.\-]+)", branches[1])
    if operation not in ("while", "call"):
        return []
    return re.findall(r"(?:body|to_apply)=%([\w.\-]+)", rest)


def _num_tensor_bytes(shapes: str) -> int:
    """Returns the bytes of shapes such as `tensor<3x4xf32>, tensor<i32>`."""
    # `ui8` and `i8` of StableHLO are `u8` and `s8` of HLO.
    return sum(
        _num_array_bytes(re.sub("^i", "s", re.sub("^ui", "u", dtype)), dims)
        for dims, dtype in re.findall(r"tensor<((?:\d+x)*)(\w+)>", shapes)
    )


def _num_array_bytes(dtype: str, dims: str) -> int:
    return _NUM_BYTES.get(dtype, 4) * math.prod(map(int, re.findall(r"\d+", dims)))


def _split_computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of each computation by name; the program itself has the name ''."""
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name = "" if header[1] else header[2]
            found[name] = []
        elif line == "}":
            name = None
        elif name is not None:
            found[name].append(line)
    return found


def _instructions(lines: list[str]) -> list[tuple[str, ...]]:
    """Returns name, shape, operation and the rest of each instruction."""
    return [found.groups() for found in map(_INSTRUCTION.match, lines) if found]


def _is_asynchronous(operation: str, rest: str) -> bool:
    return operation.endswith("-start") and '"is_sync":true' not in rest


def _kind(
    operation: str, rest: str, computations: dict[str, list[str]]
) -> tuple[str, str] | tuple[None, str]:
    """Returns the kind of a collective, and the text that has its groups; None for others."""
    base = re.sub(r"-(start|done)$", "", operation)
    if base in _COLLECTIVES:
        return base, rest
    if operation == "custom-call" and _SHARED_SUM.search(rest):
        return "all-reduce", rest
    # An asynchronous collective may be wrapped into a computation that a generic start calls.
    called = re.search(r"calls=%([\w.\-]+)", rest)
    is_pair = operation.endswith(("-start", "-done"))
    lines = computations.get(called[1], []) if called and (is_pair or operation == "fusion") else []
    inside = ((kind, rest) for _, _, kind, rest in _instructions(lines) if kind in _COLLECTIVES)
    return next(inside, (None, ""))


def _num_bytes(kind: str, operation: str, shape: str, groups: str) -> int:
    """Returns the bytes of a collective's results, or of a reduce-scatter's operands."""
    if not operation.endswith("-start") or operation == "all-reduce-start":
        nbytes = _num_shape_bytes(shape)
        if kind != "reduce-scatter":
            return nbytes
        if size := _group_size(groups):
            return nbytes * size
        raise ValueError(
            f"A reduce-scatter must have replica_groups, but this one has none: {groups}"
        )
    # A start has operands, results, and perhaps numbers of its own.
    operands, results, *_ = _elements(shape)
    return _num_shape_bytes(operands if kind == "reduce-scatter" else results)


def _num_shape_bytes(shape: str) -> int:
    """Returns the bytes of a shape such as `(f32[8]{0}, bf16[8,4]{1,0})`."""
    return sum(_num_array_bytes(*array) for array in re.findall(r"(\w+)\[([\d,]*)\]", shape))


def _elements(shape: str) -> list[str]:
    """Returns the elements of a tuple's shape, some of which may be tuples.

    >>> _elements("((f32[4]{0}, f32[2,2]{1,0}), u32[])")
    ['(f32[4]{0}, f32[2,2]{1,0})', 'u32[]']
    """
    found, depth = [""], 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [element.strip() for element in found]


def _group_size(rest: str, num_devices: int = 0) -> int:
    """Returns how many devices take part in a collective, from the groups of its text.

    Groups are listed, `{{0,1},{2,3}}`; counted, `[2,2]<=[4]`; or axes of a mesh,
    `mesh['a'=2,'b'=4] {'b'}`, which may take part of an axis, `{'b':(1)2}`.
    """
    if "replica_groups={}" in rest:
        return num_devices
    if axes := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", axes[1]))
        named = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", axes[2])
        return math.prod(int(part or sizes[name]) for name, part in named)
    listed = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", rest)
    if listed is None:
        return 0
    return listed[1].count(",") + 1 if listed[1] else int(listed[2])


# Operations whose results lie where their operands do.
_VIEWS = ("bitcast", "get-tuple-element", "tuple", "while", "opt-barrier", "copy-done")
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
        return f"{self.shape} {in_units(self.nbytes)} ({made_by or 'made by the compiler'})"


def largest_arrays(text: str, count: int = 3) -> list[HeldArray]:
    """Returns the largest arrays that a scheduled program holds when it holds most."""
    lines = _Lines(text)
    _, held = _most_held(lines, _split_computations(text), "")
    return sorted(held, key=lambda x: -x.nbytes)[:count]


def _most_held(
    lines: "_Lines", computations: dict[str, list[str]], name: str
) -> tuple[int, list[HeldArray]]:
    """Returns the most bytes that a program, or a loop body, holds, and the arrays."""
    parsed = _instructions(computations[name])
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
            fused = re.search(r"calls=%([\w.\-]+)", rest)
            # Where a fusion has no origin of its own, it is that of what it computes last.
            inside = reversed(computations.get(fused[1], ())) if fused else ()
            alive[own] = lines.array(shape, "\n".join([rest, *inside]))
            now += alive[own].nbytes
        inner = (_most_held(lines, computations, x) for x in _called(operation, rest))
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
        self._names = _numbered(text, "FileNames", r'"(.*)"')
        self._places = _numbered(text, "FileLocations", r"\{(.*)\}")
        self._frames = _numbered(text, "StackFrames", r"\{(.*)\}")

    def array(self, shape: str, rest: str) -> HeldArray:
        arrays = re.findall(r"\w+\[[\d,]*\]", shape)
        most = max(map(_num_shape_bytes, arrays), default=0)
        plain = " and ".join(x for x in arrays if _num_shape_bytes(x) * 10 >= most)
        name = re.search(r'op_name="([^"]*)"', rest)
        origin = name[1].split(";")[0].replace("\\'", "'") if name else ""
        origin = re.sub(r"^jit\(\w+\)/(shard_map/)?", "", origin)
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        line = self._line(int(frame[1])) if frame else ""
        # JAX 0.10 states the innermost line of the user, or of Flax, with the instruction.
        stated = re.search(r'source_file="([^"]*)" source_line=(\d+)', rest)
        line = line or (f"{os.path.basename(stated[1])}:{stated[2]}" if stated else "")
        return HeldArray(_num_shape_bytes(shape), plain, origin, line)

    def _line(self, frame: int) -> str:
        """Returns the innermost line of a stack that no library has; else the innermost one."""
        innermost = ""
        while frame in self._frames:
            fields = _numbers(self._frames[frame])
            place = _numbers(self._places[fields["file_location_id"]])
            file = self._names[place["file_name_id"]]
            line = f"{os.path.basename(file)}:{place['line']}"
            if not file.startswith(_jax.LIBRARIES):
                return line
            innermost = innermost or line
            # One more than the number of the frame that called; the first has none.
            frame = min(fields.get("parent_frame_id", 0), frame) - 1
        return innermost


def _numbers(entry: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", entry)}


def _numbered(text: str, title: str, pattern: str) -> dict[int, str]:
    table = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, flags=re.MULTILINE)
    entries = re.finditer(rf"^(\d+) {pattern}$", table[1] if table else "", flags=re.MULTILINE)
    return {int(entry[1]): entry[2] for entry in entries}


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
