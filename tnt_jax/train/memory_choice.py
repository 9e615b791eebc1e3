"""The choice of a way to compute a step that fits the memory of a device.

Ways are compiled in turn, the fastest first, until the memory that the compiler states for one is
within the limit: in each all rows of a rank at once, or as many as fit. What all rows need is first
estimated from the traced program. A device may have less than it states, because other programs use
it: `first_run` finds that out.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import process_count

from tnt_jax import _jax
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.sums.hlo import in_units, largest_arrays, sent_bytes
from tnt_jax.log import logger
from tnt_jax.train.execution import lacks_memory
from tnt_jax.train.steps.micro_batches import rows_of_pass, unit_of

# The option that asks for a choice of passes.
MICRO_BATCH = 'tnt_micro_batch_size="auto"'
# What helps where no step fits.
REMEDIES = (
    "Use more devices, a smaller global batch, remat='full', precision='mixed_bfloat16', or a mesh "
    "with an axis 'tensor' or 'stage' (docs/larger_models.md)"
)
# Below this share of the limit it is worth a compilation to look for a larger pass.
_MUCH_SPACE = 0.85


class Way(NamedTuple):
    """A way to compute a step."""

    name: str  # Empty for the step as it is.
    floor: int  # Bytes of training state and batches on each device, however it is computed.
    grads: int  # Bytes of the gradients on each device, which several passes add up.
    # From the most rows of a pass, or None for all.
    program: Callable[[int | None], _jax.TracedProgram]
    beside: int = 0  # Bytes of `floor` that are held beside operands.
    num_rows: int | None = None  # Of a rank, if several passes are asked for.
    # Returns why all rows must be computed at once; None if they need not.
    why_whole: Callable[[], str | None] = lambda: None


class Attempt(NamedTuple):
    """A step that was looked at."""

    name: str  # That of its way, and its passes.
    nbytes: float  # On each device; of the training state alone if that is too much already.
    is_compiled: bool = True  # Else the bytes are those of the state, or an estimate.
    rows_at_once: int | None = None  # Most of a pass; None for all.
    problem: str = ""  # Why the model cannot be computed so; `nbytes` is infinite then.
    largest: tuple[str, ...] = ()  # Of a step that does not fit, the arrays that take most.
    operations: int = 0  # How many numbers the step multiplies; 0 if it was not traced.
    added_bytes: int = 0  # Of the gradients that several passes add up.
    sent_bytes: float | None = None  # By a device in a compiled step, if all ways are asked for.

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} is impossible: {self.problem}"
        return f"{self.name} needs {'' if self.is_compiled else 'about '}{in_units(self.nbytes)}"


class Choice(NamedTuple):
    """What was chosen, and why."""

    asked: str  # The option that asked for it.
    attempts: tuple[tuple[Attempt, ...], ...]  # Way by way; the last one fits.
    limit: int  # Bytes of a device.
    note: str = ""  # Why all rows had to be computed at once; empty if they had not.
    others: tuple[Attempt, ...] = ()  # Estimates of the slower ways, if they were asked for.

    @property
    def way(self) -> int:
        """Index of the way that was chosen."""
        return len(self.attempts) - 1

    @property
    def chosen(self) -> Attempt:
        """The step that was chosen."""
        return self.attempts[-1][-1]

    @property
    def num_compiled(self) -> int:
        """Number of programs that were compiled for the choice."""
        return sum(attempt.is_compiled for way in self.attempts for attempt in way)

    @property
    def rows_at_once(self) -> int | None:
        """Most rows of a rank that are computed in one pass; None for all."""
        return self.chosen.rows_at_once

    def exceeds(self, attempt: Attempt) -> bool:
        """Returns whether a step needs more than a device has."""
        return attempt.nbytes > self.limit

    def relative_time(self, attempt: Attempt) -> float | None:
        """Estimates the time of a step, by its products, as a multiple of the first traced one's.

        Other operations and communication are left out. None if it was not traced.
        """
        operations = (x.operations for way in self.attempts for x in way)
        first = next(filter(None, operations), 0)
        return attempt.operations / first if first and attempt.operations else None

    def __str__(self) -> str:
        *others, last = self.attempts
        needed, limit = in_units(self.chosen.nbytes), in_units(self.limit)
        # The estimate of what was chosen, and what needs less, was not too much.
        ends = (x for way in (*others, last[:-1]) for x in (*way[:1], *way[-1:]))
        tried = [x for x in dict.fromkeys(ends) if x.name != self.chosen.name and self.exceeds(x)]
        chosen = f"{self.asked} chose {self.chosen.name}, which needs {needed} of {limit} a device"
        if not tried:
            return chosen
        times = [self.relative_time(x) for x in (self.chosen, *tried)]
        texts = [
            f"{text} (time {time:.2f})" if time is not None else text
            for text, time in zip((chosen, *map(str, tried)), times, strict=True)
        ]
        line = f"{texts[0]}; too much: {'; '.join(texts[1:])}{self.note}"
        return f"{line}. {TIMES}" if any(times) else line


TIMES = "Times are estimates, by the products of matrices and convolutions that a step computes"


def choose(
    asked: str,
    ways: Iterable[Way],
    limit: int,
    *,
    looks_at_all: bool = False,
    remedies: str = REMEDIES,
) -> Choice:
    """Returns the first way whose step fits; all processes must call it, and choose alike.

    Ways come with the fastest first, and each is asked for when it is needed. If `looks_at_all`,
    slower ways are estimated as well, and communication is counted. A ValueError, on every process,
    says that no step fits in `limit` bytes, for which an option `asked`, and names remedies.
    """
    attempts: list[tuple[Attempt, ...]] = []
    ways = iter(ways)
    for way in chain([first := next(ways)], ways):
        try:
            attempts.append(tuple(_attempts(way, limit, counts_sent=looks_at_all)))
        except ValueError as error:
            if not attempts:
                raise
            attempts.append((_impossible(way, error),))
        if attempts[-1][-1].nbytes <= limit:
            break
    asks = len(attempts) > 1 or attempts[0][-1].nbytes > limit
    problem = first.why_whole() if asks and first.num_rows is not None else None
    note = f". {problem}, so that all rows of a rank are computed at once" if problem else ""
    if attempts[-1][-1].nbytes <= limit:
        others = list(map(_estimated, ways)) if looks_at_all else []
        return Choice(asked, tuple(attempts), limit, note, tuple(others))
    ends = (x for way in attempts for x in (*way[:1], *way[-1:]))
    tried = "; ".join(map(str, dict.fromkeys(ends)))
    largest = [x.largest for way in attempts for x in way if x.largest]
    most = f". Most of the last step is taken by {'; '.join(largest[-1])}" if largest else ""
    raise ValueError(
        f"{asked} found no way to compute a step that fits the {in_units(limit)} of a device: "
        f"{tried}{note}{most}. {remedies}. TNT_DEVICE_MEMORY sets the limit."
    )


def _impossible(way: Way, error: ValueError) -> Attempt:
    return Attempt(way.name, math.inf, False, problem=str(error).partition(". ")[0])


def _estimated(way: Way) -> Attempt:
    """Returns what a step that computes all rows at once needs, by an estimate."""
    try:
        program = way.program(None)
    except ValueError as error:
        return _impossible(way, error)
    nbytes = _agreed(way.floor + program.estimate_bytes())
    return Attempt(_name(way, None), nbytes, False, operations=program.operations())


def _attempts(way: Way, limit: int, *, counts_sent: bool) -> list[Attempt]:
    """Returns the steps of a way that were compiled; the last one fits if any does.

    The memory of a pass grows with its rows. The next number of rows is where the line through the
    last passes, or one and what does not depend on rows, meets the limit. At first, all rows are
    known by an estimate alone: if that is too much, fewer are compiled.
    """
    floor = _agreed(way.floor)
    if floor > limit:
        name = f"{way.name or 'one pass'} (state and batches alone)"
        return [Attempt(name, floor, is_compiled=False)]
    num_rows, zero = way.num_rows or 1, (0, floor + _agreed(way.grads))
    whole = way.program(None)
    tried: list[Attempt] = []
    passes: list[tuple[int, float]] = []

    def look(rows: int) -> bool:
        """Compiles passes of some rows; returns whether they fit."""
        most = None if rows == num_rows else rows
        program = whole if most is None else way.program(most)
        held = way.floor - way.beside
        memory = program.compile(held_bytes=held)
        nbytes = _agreed(memory.most_bytes(held) + way.beside)
        text = memory.compiled.as_text() if nbytes > limit or counts_sent else ""
        tried.append(
            Attempt(
                _name(way, most),
                nbytes,
                rows_at_once=most,
                largest=tuple(map(str, largest_arrays(text))) if nbytes > limit else (),
                operations=program.operations(),
                added_bytes=way.grads * math.ceil(num_rows / rows) if most else 0,
                sent_bytes=sent_bytes(text) if counts_sent else None,
            )
        )
        if most is not None:
            passes.append((rows, nbytes))
        return nbytes <= limit

    def most_rows(upper: int) -> int:
        """Returns the rows of a pass that should fit, `upper` at most."""
        line = passes[-2:] if len(passes) > 1 else [zero, *(passes or [(num_rows, needed)])]
        return equal_rows(num_rows, min(max(_rows_at(limit, *line), 1), upper))

    needed: float = _agreed(floor + whole.estimate_bytes())
    is_whole = num_rows == 1 or zero[1] >= limit
    upper = num_rows
    if needed <= limit or is_whole or way.why_whole():
        if look(num_rows) or is_whole or way.why_whole():
            return tried
        upper, needed = num_rows - 1, tried[-1].nbytes
    else:
        unknown = Attempt(_name(way, None), needed, False, operations=whole.operations())
        tried.append(unknown)
    while not look(rows := most_rows(upper)):
        if rows == 1 or (len(passes) > 1 and _rows_at(limit, *passes[-2:]) < 1):
            return tried
        upper = rows - 1
    best = tried[-1]
    for _ in range(2):
        if best.nbytes > _MUCH_SPACE * limit or (more := most_rows(upper)) <= rows:
            break
        if look(more):
            best, rows = tried[-1], more
        else:
            upper = more - 1
    return [*(x for x in tried if x is not best), best]


def _rows_at(limit: int, point: tuple[int, float], other: tuple[int, float]) -> int:
    """Returns the rows at which the line through two points `(rows, bytes)` meets a limit."""
    (rows, nbytes), (other_rows, other_nbytes) = point, other
    per_row = (other_nbytes - nbytes) / (other_rows - rows)
    return math.floor(rows + (limit - nbytes) / per_row) if per_row > 0 else 0


def equal_rows(num_rows: int, most: int) -> int:
    """Returns the rows of equal passes of at most `most` rows, rounded as `rows_of_pass` prefers.

    >>> equal_rows(30_000, 10_000)
    7552
    """
    return rows_of_pass(num_rows, most - most % unit_of(most))


def _name(way: Way, rows_at_once: int | None) -> str:
    if way.num_rows is None:
        return way.name or "the step"
    count = 1 if rows_at_once is None else math.ceil(way.num_rows / rows_at_once)
    passes = "one pass" if count == 1 else f"{count} passes of {rows_at_once} rows"
    return f"{way.name}, {passes}" if way.name else passes


def _agreed(nbytes: int) -> int:
    # Processes might have other compilers; what they choose must not differ.
    return int(collectives.all_reduce(nbytes, "max"))


def memory_limit(devices: Sequence[Any], setting: int | None, state: Any) -> int:
    """Returns the bytes that a step may use on a device, the same on every process.

    They are those of the setting (`TNT_DEVICE_MEMORY`), those that the device states without what
    other arrays than `state` take, or an equal share of the host's memory for each device of this
    process; of several processes and devices the least.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    stated = (_free_bytes(device, own=local_bytes(state)) for device in devices)
    least = min(host if free is None else free for free in stated)
    return int(collectives.all_reduce(least if setting is None else setting, "min"))


def local_bytes(tree: Any) -> int:
    """Returns the bytes on each device of arrays, or their descriptions, with shardings."""
    shapes = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)


_T = TypeVar("_T")


def first_run(
    start: Callable[[], _T],
    *,
    devices: Sequence[Any],
    computed_bytes: Callable[[], int],
    fewer_rows: Callable[[], bool],
    put_back: Callable[[], None] = lambda: None,
) -> _T:
    """Runs a program for the first time; without memory for it, one with fewer rows at once.

    A process that is alone runs it and sees, unless its devices state that they have too little:
    GPUs wait 10 s for memory that is not there. Of several, one that lacks memory within a program
    would leave the others waiting for it: all ask beforehand for what it computes, and go on alike.

    `start` starts the program that there is by then, which holds `computed_bytes` on each device
    besides its operands. `fewer_rows` returns whether fewer are possible, and `put_back` replaces
    operands that a program has taken and that failed.
    """
    if process_count() > 1:
        while True:
            lacks = not _find_memory(devices, computed_bytes())
            if not collectives.any_process(lacks, where="the first step") or not fewer_rows():
                return start()
    states_memory = any(_free_bytes(device) is not None for device in devices)
    while True:
        if states_memory and _lack(devices, computed_bytes()) and fewer_rows():
            continue
        try:
            return jax.block_until_ready(start())
        except jax.errors.JaxRuntimeError as error:
            if not lacks_memory(error):
                raise
            put_back()
            if not fewer_rows():
                raise


def _free_bytes(device: Any, *, own: int = 0) -> int | None:
    """Returns the bytes that no array but `own` ones takes; None if they are not stated."""
    stats = device.memory_stats() or {}
    others = max(stats.get("bytes_in_use", 0) - own, 0)
    return stats["bytes_limit"] - others if "bytes_limit" in stats else None


def _lack(devices: Sequence[Any], nbytes: int) -> bool:
    """Returns whether a device states that it has less memory."""
    return any((free := _free_bytes(x)) is not None and free < nbytes for x in devices)


def _find_memory(devices: Sequence[Any], nbytes: int) -> bool:
    """Returns whether each device has memory for an array of so many bytes, which is dropped."""
    if _lack(devices, nbytes):
        return False
    try:
        shape = (-(-nbytes // 2**20), 2**20)
        jax.block_until_ready([jnp.zeros(shape, np.uint8, device=device) for device in devices])
    except jax.errors.JaxRuntimeError as error:
        if not lacks_memory(error):
            raise
        return False
    return True


def half_as_many(num_rows: int, most: int | None) -> int | None:
    """Returns half of the most rows of a pass (None for all), and warns; None if it has one row."""
    most = most or num_rows
    if most == 1:
        return None
    fewer = equal_rows(num_rows, most // 2)
    logger.warning(
        "A device has no memory for %d rows at once, although the compiler stated that they "
        "fit: %d are computed at once from here on. TNT_DEVICE_MEMORY sets the limit.",
        most,
        fewer,
    )
    return fewer


def found_no_memory(name: str, less: str) -> None:
    """Warns that a step, by its name, gives way to one that needs less memory."""
    logger.warning(
        "A device has no memory for a step of %s, although the compiler stated that it fits: %s "
        "from here on. TNT_DEVICE_MEMORY sets the limit.",
        name,
        less,
    )
