"""Finds the blocks of a list in a traced program, which must be equal and follow one another.

Where one block ends and the next begins does not stand in a program. What all blocks but the first
start from is what crosses from the use of one block's parameters to that of the next one's. The
other ends follow, because the equations from one end to the next must be the same in every block.
So the blocks may be modules of any library, or lines of a function.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tnt_jax import _jax
from tnt_jax.sharded.blocks.tracing import Sources, variables_in

# Calls whose name is that of a function, and says nothing.
_NAMED = ("jit", "pjit", "closed_call", "core_call")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def same_type(a: Any, b: Any) -> bool:
    """Returns whether two variables or literals have one shape, dtype, and axes that vary."""
    kinds = [(x.aval.shape, x.aval.dtype, _jax.varying_axes_of(x.aval)) for x in (a, b)]
    return bool(kinds[0] == kinds[1])


def same_literal(a: Any, b: Any) -> bool:
    """Returns whether two literals have the same type and value."""
    values = [np.asarray(x.val) for x in (a, b)]
    return same_type(a, b) and values[0].tobytes() == values[1].tobytes()


def same_equation(a: Any, b: Any) -> bool:
    """Returns whether two equations compute the same, given the same operands."""
    if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
        return False
    if len(a.outvars) != len(b.outvars) or a.params.keys() != b.params.keys():
        return False
    if not all(map(same_type, a.outvars, b.outvars)):
        return False
    name = a.primitive.name
    return all(
        (key == "name" and name in _NAMED) or _same(x, b.params[key], is_custom=name in _CUSTOM)
        for key, x in a.params.items()
    )


def _same(x: Any, y: Any, *, is_custom: bool = False) -> bool:
    if x is y:
        return True
    if isinstance(x, _jax.ClosedJaxpr) and isinstance(y, _jax.ClosedJaxpr):
        is_one = not is_custom or _jax.function_of(x.jaxpr) == _jax.function_of(y.jaxpr)
        return (
            is_one and _same_program(x.jaxpr, y.jaxpr) and _same(tuple(x.consts), tuple(y.consts))
        )
    if isinstance(x, _jax.Jaxpr) and isinstance(y, _jax.Jaxpr):
        return _same_program(x, y)
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return x.keys() == y.keys() and all(_same(x[key], y[key]) for key in x)
    if is_custom and not isinstance(x, (int, str)):
        return True
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x.dtype == y.dtype and np.array_equal(x, y)
    return type(x) is type(y) and bool(np.all(x == y))


def _same_program(a: Any, b: Any) -> bool:
    given = [[*x.constvars, *x.invars] for x in (a, b)]
    if len(given[0]) != len(given[1]) or len(a.eqns) != len(b.eqns):
        return False
    known = dict(zip(*given, strict=True))
    if not all(x.aval == y.aval for x, y in known.items()):
        return False

    def same_atom(x: Any, y: Any) -> bool:
        literals = [isinstance(atom, _jax.Literal) for atom in (x, y)]
        if any(literals):
            return all(literals) and same_literal(x, y)
        return known.get(x) is y

    for e, f in zip(a.eqns, b.eqns, strict=True):
        if not (same_equation(e, f) and all(map(same_atom, e.invars, f.invars))):
            return False
        known.update(zip(e.outvars, f.outvars, strict=True))
    return len(a.outvars) == len(b.outvars) and all(map(same_atom, a.outvars, b.outvars))


def _difference(blocks: Sequence[list[Any]], names: Sequence[str], verb: str) -> str | None:
    """Returns the first equation of a block that differs from that of the first block."""
    for name, block in zip(names[1:], blocks[1:], strict=True):
        for a, b in zip(blocks[0], block, strict=False):
            if not same_equation(a, b):
                return f"{name} {verb} {_words(b)} where {names[0]} {verb} {_words(a)}"
    return None


def _other_length(blocks: Sequence[list[Any]], names: Sequence[str]) -> str | None:
    for name, block in zip(names, blocks, strict=True):
        if len(block) != len(blocks[0]):
            return f"{name} has {len(block)} operations where {names[0]} has {len(blocks[0])}"
    return None


def _words(equation: Any) -> str:
    return f"{equation.primitive.name} {_jax.kind_of(equation.outvars[0].aval)}"


# The variables and literals that stand at one place of several blocks.
Atoms = tuple[Any, ...]


class Step(NamedTuple):
    """The same equation in each block, and what each of its operands is in each block."""

    equations: tuple[Any, ...]
    operands: tuple[Atoms, ...]


@dataclass
class _Match:
    """Match of blocks backward from their ends: the start of the first one, and equations.

    `starts` are what the blocks start from; None of the first one if that is to be found.
    """

    blocks: Sequence[int]
    starts: Sequence[Any]
    start: dict[int, Any] = field(default_factory=dict)
    steps: dict[tuple[int, ...], Step] = field(default_factory=dict)


class EqualBlocks:
    """The blocks of a list in a program; `params` are variables of each one's arrays.

    `constants` has for variables others of the same value; all but constants vary over `axes`.
    Found are the variables `carried` before the first block, after it, and so on, the `steps` of a
    block, and `items` that differ between the blocks beside their `arrays`. A ValueError says how
    blocks differ.
    """

    def __init__(
        self,
        equations: Sequence[Any],
        outputs: Sequence[Any],
        params: Sequence[Sequence[Any]],
        *,
        names: Sequence[str],
        constants: dict[Any, Any],
        axes: frozenset[str],
    ) -> None:
        self._equations = equations
        self.arrays: list[Atoms] = list(zip(*params, strict=True))
        self._names = names
        self._constants = constants
        self._axes = axes
        self._place = {
            v: (i, number) for i, block in enumerate(params) for number, v in enumerate(block)
        }
        self._made = {v: (at, i) for at, e in enumerate(equations) for i, v in enumerate(e.outvars)}
        self._depth = _depths(equations, self._place)
        self._of_depth: list[list[Any]] = [[] for _ in names]
        for v in self._made:
            if (depth := self._depth.get(v, -1)) >= 0:
                self._of_depth[depth].append(v)
        self._uses = self._find_uses()
        self.carried = self._find_chain(outputs)
        found, ends = _Match(range(len(names)), self.carried), zip(*self.carried[1:], strict=True)
        is_same = self._compare(list(ends), found)
        assert is_same, "Each block equals the first one."
        self.steps, self.items = self._with_own_inputs(found)
        self._check_uses()
        self._check_results(outputs)

    def is_in_block(self, equation: Any) -> bool:
        """Returns whether an equation belongs to a block."""
        return id(equation) in self._ids

    def depends(self, equation: Any) -> bool:
        """Returns whether an equation depends on the arrays of a block."""
        return any(self._depth_of(x) >= 0 for x in equation.invars)

    def _find_uses(self) -> list[list[int]]:
        """Returns the positions of the equations that use arrays of each block, casts left out."""
        sources = Sources(self._place)
        blocks = [i for i, _ in self._place.values()]
        uses: list[list[int]] = [[] for _ in self._names]
        for at, equation in enumerate(self._equations):
            if not sources.passes(equation):
                found = {sources.of(v) for v in equation.invars}
                for block in {blocks[index] for index in found if index is not None}:
                    uses[block].append(at)
        for name, found in zip(self._names, uses, strict=True):
            if not found:
                raise self._error(f"{name} is not used")
        for block, (before, after) in enumerate(pairwise(uses)):
            name, other = self._names[block : block + 2]
            if before[0] == after[0]:
                kind = self._equations[before[0]].primitive.name
                raise self._error(f"one operation ({kind}) computes {name} and {other}")
            if before[0] > after[0]:
                raise self._error(f"{other} is not used after {name}")
        return uses

    def _find_chain(self, outputs: Sequence[Any]) -> list[Atoms]:
        """Returns what is carried from block to block, beginning before the first one."""
        for first in self._candidates(outputs):
            chain: list[Any] = [None, first]
            for block in range(1, len(self._names)):
                following = self._following(block, chain)
                if following is None:
                    break
                chain.append(following)
            else:
                return chain
        raise self._error(self._why_unequal())

    def _why_unequal(self) -> str:
        """Returns in words how blocks differ."""
        names, uses = self._names, self._uses
        # The equations from the first use of a block's arrays on to the last, and those after it.
        inside, after = ([[] for _ in names] for _ in range(2))
        for at, equation in enumerate(self._equations):
            block = self._last_block(equation)
            if block < 0 or at < uses[block][0]:
                continue
            end = uses[block + 1][0] if block < len(names) - 1 else len(self._equations)
            last_use = max(x for x in uses[block] if x < end)
            (inside if at <= last_use else after)[block].append(equation)
        return (
            _difference(inside, names, "computes")
            or _other_length(inside, names)
            or self._result_used_later()
            or _difference(after, names, "is followed by")
            or f"what stands before {names[0]} is not what stands before the others, or of other "
            "types"
        )

    def _result_used_later(self) -> str | None:
        """Returns which block's result is used by more than the next block."""
        for equation in self._equations:
            block = self._last_block(equation)
            for v in variables_in(equation.invars):
                depth = self._depth_of(v)
                if v not in self._place and 0 <= depth < block - 1:
                    found = f"{self._names[depth]} ({_jax.kind_of(v.aval)})"
                    return f"a result of {found} is used by {self._names[block]}, too"
        return None

    def _last_block(self, equation: Any) -> int:
        return max(map(self._depth_of, equation.outvars), default=-1)

    def _candidates(self, outputs: Sequence[Any]) -> list[Atoms]:
        """Returns what may be carried from the first block to the second, the least first."""
        last_use = {
            v: at for at, e in enumerate(self._equations) for v in e.invars if not _is_literal(v)
        }
        last_use |= dict.fromkeys(variables_in(outputs), len(self._equations))
        begin = self._uses[1][0]
        end = max(at for at in self._uses[0] if at < begin)
        made = [
            v
            for e in self._equations[:begin]
            for v in e.outvars
            if self._depth.get(v) == 0 and v in last_use
        ]
        needed = self._needed_by_uses(block=1)
        found = []
        for at in range(end + 1, begin + 1):
            live = tuple(v for v in made if self._made[v][0] < at <= last_use[v])
            # Others may be results beside what is carried, which are refused later with a reason.
            for some in (live, tuple(v for v in live if v in needed)):
                if some and some not in found:
                    found.append(some)
        return sorted(found, key=lambda live: (len(live), sum(v.aval.size for v in live)))

    def _needed_by_uses(self, block: int) -> set[Any]:
        """Returns the variables that the equations that use a block's arrays need."""
        uses = set(self._uses[block])
        needed: set[Any] = set()
        for at in reversed(range(max(uses) + 1)):
            equation = self._equations[at]
            if at in uses or any(v in needed for v in equation.outvars):
                needed.update(variables_in(equation.invars))
        return needed

    def _following(self, block: int, chain: list[Any]) -> Atoms | None:
        """Returns what follows a block; notes in `chain` what stands before the first one."""
        known = {} if chain[0] is None else dict(enumerate(chain[0]))
        ends = []
        for before in chain[1]:
            for variable in self._of_depth[block]:
                found = _Match((0, block), (chain[0], chain[block]), dict(known))
                if same_type(before, variable) and self._compare([(before, variable)], found):
                    known = found.start
                    ends.append(variable)
                    break
            else:
                return None
        if len(known) < len(chain[1]):
            return None
        chain[0] = tuple(known[place] for place in range(len(known)))
        return tuple(ends)

    def _compare(self, ends: list[Atoms], found: _Match) -> bool:
        """Returns whether blocks compute their ends in the same way, backward to the starts."""
        pending, seen = list(ends), set()
        while pending:
            atoms = pending.pop()
            key = key_of(atoms)
            if key in seen:
                continue
            seen.add(key)
            is_same = self._compare_place(atoms, found)
            step = self._step(atoms) if is_same is None else None
            if step is not None:
                found.steps[tuple(self._made[x][0] for x in atoms)] = step
                pending += step.operands
            elif not is_same:
                return False
        return True

    def _compare_place(self, atoms: Atoms, found: _Match) -> bool | None:
        """Returns whether one place is the same in blocks; None if equations make it."""
        if self.is_shared(atoms):
            return True
        places = {
            i: start.index(x)
            for i, (start, x) in enumerate(zip(found.starts, atoms, strict=False))
            if start is not None and not _is_literal(x) and x in start
        }
        if places:
            return self._is_start(atoms, places, found)
        params = [None if _is_literal(x) else self._place.get(x) for x in atoms]
        if any(params):
            numbers = {place[1] for place in params if place is not None}
            return any(params == [(block, number) for block in found.blocks] for number in numbers)
        if all(self._depth_of(x) < 0 for x in atoms):
            return all(same_type(atoms[0], x) for x in atoms)
        return None

    def _is_start(self, atoms: Atoms, places: dict[int, int], found: _Match) -> bool:
        """Returns whether all blocks take what they start from where one of them does."""
        number = next(iter(places.values()))
        first = atoms[0]
        is_known = found.starts[0] is not None
        if set(places.values()) != {number} or len(places) < len(atoms) - (not is_known):
            return False
        if is_known:
            return True
        is_before = (
            not _is_literal(first) and self._depth_of(first) < 0 and first not in self._place
        )
        same = same_type(first, atoms[-1]) and found.start.setdefault(number, first) is first
        return is_before and same

    def _step(self, atoms: Atoms) -> Step | None:
        """Returns the equation that makes a variable in every block; None if they differ."""
        if any(_is_literal(x) or x not in self._made for x in atoms):
            return None
        made = [self._made[x] for x in atoms]
        equations = tuple(self._equations[at] for at, _ in made)
        first = equations[0]
        if any(i != made[0][1] for _, i in made):
            return None
        if not all(same_equation(first, other) for other in equations[1:]):
            return None
        return Step(equations, tuple(zip(*(e.invars for e in equations), strict=True)))

    def _with_own_inputs(self, found: _Match) -> tuple[list[Step], list[Atoms]]:
        """Returns a block's equations, and what differs between blocks beside their arrays."""
        known: dict[tuple[int, ...], Step | bool] = {}

        def reach(atoms: Atoms) -> bool:
            """Finds how a layer gets what stands at a place; returns whether it can."""
            key = key_of(atoms)
            if key not in known:
                step = None if self.is_shared(atoms) else self._step(atoms)
                if step is not None and all(reach(operand) for operand in step.operands):
                    known[key] = step
                else:
                    # Stages have different items, so their type must say so already.
                    known[key] = self.is_shared(atoms) or all(
                        not _is_literal(x) and _jax.varying_axes_of(x.aval) >= self._axes
                        for x in atoms
                    )
            return known[key] is not False

        steps, items = dict(found.steps), dict[tuple[int, ...], Atoms]()
        pending = list(found.steps.values())
        while pending:
            step = pending.pop()
            for atoms in step.operands:
                if any(self._depth_of(x) >= 0 for x in atoms) or self.is_shared(atoms):
                    continue
                if not reach(atoms):
                    raise self._error(
                        f"{step.equations[0].primitive.name} has an operand "
                        f"{_jax.kind_of(atoms[0].aval)} that differs between them"
                    )
                how, at = known[key_of(atoms)], tuple(self._made.get(x, (-1,))[0] for x in atoms)
                if not isinstance(how, Step):
                    items[key_of(atoms)] = atoms
                elif at not in steps:
                    steps[at] = how
                    pending.append(how)
        self._ids = {id(e) for step in steps.values() for e in step.equations}
        return [steps[at] for at in sorted(steps)], list(items.values())

    def is_shared(self, atoms: Atoms) -> bool:
        """Returns whether one value stands at a place of all blocks."""
        if any(map(_is_literal, atoms)):
            return all(map(_is_literal, atoms)) and all(same_literal(atoms[0], x) for x in atoms)
        first = self._constants.get(atoms[0], atoms[0])
        return self._depth_of(first) < 0 and all(self._constants.get(x, x) is first for x in atoms)

    def _depth_of(self, x: Any) -> int:
        return -1 if _is_literal(x) else self._depth.get(x, -1)

    def _check_uses(self) -> None:
        for name, uses in zip(self._names, self._uses, strict=True):
            for at in uses:
                if not self.is_in_block(self._equations[at]):
                    raise self._error(
                        f"parameters of {name} are used outside of it, too "
                        f"({self._equations[at].primitive.name}), as by a regularizer; use the "
                        "weight_decay of an optimizer instead"
                    )

    def _check_results(self, outputs: Sequence[Any]) -> None:
        known = set(self.carried[-1])
        others = [e for e in self._equations if not self.is_in_block(e) and self.depends(e)]
        sources = Sources(self._place)
        for operands, results in [
            *((e.invars, e.outvars) for e in others if not sources.passes(e)),
            (outputs, ()),
        ]:
            for v in variables_in(operands):
                if self._depth_of(v) >= 0 and v not in known:
                    raise self._error(
                        f"a result of {self._names[self._depth[v]]} ({_jax.kind_of(v.aval)}) is "
                        "used after the blocks, as statistics, added losses and prints are"
                    )
            known.update(results)

    def _error(self, reason: str) -> ValueError:
        return ValueError(
            f"A pipeline over the list {self._names[0]}, ..., {self._names[-1]} needs equal blocks "
            "in a row, each of which takes the result of the one before and no other results of "
            f"blocks, but {reason}. Change the model, or leave the axis 'stage' out of mesh."
        )


def key_of(atoms: Atoms) -> tuple[int, ...]:
    """Returns what identifies the value at one place of the blocks."""
    return tuple(map(id, atoms))


def _is_literal(x: Any) -> bool:
    return isinstance(x, _jax.Literal)


def _depths(equations: Sequence[Any], places: dict[Any, tuple[int, int]]) -> dict[Any, int]:
    depth = {v: block for v, (block, _) in places.items()}
    for equation in equations:
        found = max((depth.get(v, -1) for v in variables_in(equation.invars)), default=-1)
        if found >= 0:
            depth.update(dict.fromkeys(equation.outvars, found))
    return depth
