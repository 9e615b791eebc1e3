"""Memory of programs: by an estimate before they are compiled, and by the compiler."""

from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

from tnt_jax._jax.programs import (
    CALLS,
    Literal,
    jaxprs_in_params,
    operations_of_products,
    without_dead_code,
)

# Operations that the compiler computes where their results are used, and again for each use.
_CHEAP = frozenset(
    """abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp concatenate
    convert_element_type copy eq expand_dims floor ge gt integer_pow iota is_finite le lt max min
    mul name ne neg not or pad pcast pvary real reshape rev round select_n shift_left
    shift_right_logical sign slice split square squeeze stop_gradient sub transpose xor""".split()
)
# The same where a result is used once; several uses read one array.
_COSTLY = frozenset(
    """atan2 cbrt cos div erf erf_inv exp exp2 expm1 log log1p logistic pow rem rsqrt
    sin sqrt tanh""".split()
)
_FUSED = _CHEAP | _COSTLY
# Operations that read what they reduce where it is computed.
_REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_sum".split()
)
_INLINED = (*CALLS, "shard_map", "remat2")


class TracedProgram:
    """A program of `jitted.trace(...)`, or the programs of a step, whose memory can be told."""

    def __init__(self, traced: Any) -> None:
        self._traced = traced
        self._jaxprs = [program.jaxpr.jaxpr for program in _programs_of(traced)]

    def estimate_bytes(self) -> int:
        """Returns about what it holds on each device besides operands, without compiling it."""
        return max(map(live_bytes, self._jaxprs))

    def operations(self) -> int:
        """Returns how many numbers it multiplies in products, on each device of a `shard_map`."""
        # The compiler leaves out what no result needs: passes trace all rows once more.
        return sum(operations_of_products(without_dead_code(x)) for x in self._jaxprs)

    def compile(self, *, held_bytes: int = 0) -> "ProgramMemory":
        """Returns its memory on each device, by the compiler's own analysis; see `of`."""
        return ProgramMemory.of(self._traced.lower().compile(), held_bytes=held_bytes)


class ProgramMemory(NamedTuple):
    """The bytes of a compiled program on each device."""

    operand_bytes: int
    # Of results that do not take the place of operands, and the most held in between.
    computed_bytes: int
    compiled: Any

    @classmethod
    def of(cls, compiled: Any, *, held_bytes: int = 0) -> "ProgramMemory":
        """Returns it for a program, or for that of a step's at which a device holds most."""
        found = []
        for program in _programs_of(compiled):
            memory = program.memory_analysis()
            results = memory.output_size_in_bytes - memory.alias_size_in_bytes
            computed = results + memory.temp_size_in_bytes
            found.append(cls(memory.argument_size_in_bytes, computed, program))
        return max(found, key=lambda x: x.most_bytes(held_bytes))

    def most_bytes(self, held_bytes: int) -> int:
        """Returns the bytes of a device that holds so many, the operands among them."""
        return max(held_bytes, self.operand_bytes) + self.computed_bytes


def _programs_of(step: Any) -> Iterable[Any]:
    return getattr(step, "by_name", {"": step}).values()


class _Step(NamedTuple):
    """An operation of a program whose calls are inlined; values are numbers."""

    name: str
    operands: list[int]
    results: dict[int, int]  # And their bytes.
    inner_bytes: int  # Of a loop or a branch while it runs.


def live_bytes(jaxpr: Any) -> int:
    """Estimates the most bytes that a program holds at once besides its operands and results."""
    # The compiler computes elementwise operations within those that read them: what they compute is
    # held only where several read it, or where an operation needs its operands as arrays.
    steps, results = _inlined(jaxpr)
    readers: dict[int, list[_Step]] = {}
    for step in steps:
        for value in step.operands:
            readers.setdefault(value, []).append(step)

    def is_held(step: _Step, value: int) -> bool:
        uses = readers.get(value, [])
        if value in results or not uses:
            return False
        if step.name not in _FUSED or (step.name in _COSTLY and len(uses) > 1):
            return True
        return any(reader.name not in _FUSED | _REDUCTIONS for reader in uses)

    held = {value for step in steps for value in step.results if is_held(step, value)}
    return _most_at_once(steps, held)


def _most_at_once(steps: list[_Step], held: set[int]) -> int:
    # What is computed where it is used needs its operands there.
    last: dict[int, int] = {}
    for index in reversed(range(len(steps))):
        step = steps[index]
        at = max([index, *(last.get(x, index) for x in step.results if x not in held)])
        for value in step.operands:
            last[value] = max(last.get(value, 0), at)
    ends: dict[int, int] = {}
    now = most = 0
    for index, step in enumerate(steps):
        own = {value: nbytes for value, nbytes in step.results.items() if value in held}
        for value, nbytes in own.items():
            ends[last[value]] = ends.get(last[value], 0) + nbytes
        now += sum(own.values())
        # A fused result takes the place of an operand that nothing reads later.
        reused = min(sum(own.values()), ends.get(index, 0)) if step.name in _FUSED else 0
        most = max(most, now - reused + step.inner_bytes)
        now -= ends.pop(index, 0)
    return most


def _inlined(jaxpr: Any) -> tuple[list[_Step], set[int]]:
    steps: list[_Step] = []
    numbers = count()

    def run(jaxpr: Any, operands: list[int | None]) -> list[int | None]:
        values = dict(zip(jaxpr.invars, operands, strict=True))

        def read(variables: Any) -> list[int | None]:
            return [
                None if isinstance(x, Literal) else values.setdefault(x, next(numbers))
                for x in variables
            ]

        for equation in jaxpr.eqns:
            given = read(equation.invars)
            inner = list(jaxprs_in_params(equation.params))
            if equation.primitive.name in _INLINED and len(inner) == 1:
                values.update(zip(equation.outvars, run(inner[0], given), strict=True))
                continue
            name = equation.primitive.name
            # Of two words for each random number, which are combined where they are used.
            words = 2 if name == "random_bits" else 1
            made = {read([x])[0]: words * _nbytes(x.aval) for x in equation.outvars}
            nbytes = max([_own_bytes(equation), *map(live_bytes, inner)])
            used = [x for x in given if x is not None]
            steps.append(_Step(name, used, made, nbytes))  # type: ignore[arg-type]
        return read(jaxpr.outvars)

    results = run(jaxpr, [next(numbers) for _ in jaxpr.invars])
    return steps, {x for x in results if x is not None}


def _own_bytes(equation: Any) -> int:
    """Returns the bytes that an operation holds beside its operands and results."""
    if equation.primitive.name == "random_bits":  # Counters.
        return 2 * _nbytes(equation.outvars[0].aval)
    if equation.primitive.name == "select_and_scatter_add":  # Indices of the maxima of windows.
        operand = equation.invars[-1].aval
        return operand.ndim * operand.size * 4
    return 0


def _nbytes(aval: Any) -> int:
    return getattr(aval, "size", 0) * getattr(getattr(aval, "dtype", None), "itemsize", 0)
