"""Replaces the sums over all devices of a program by calls of another implementation."""

import functools
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tnt_jax._jax.compiling import stand_around
from tnt_jax._jax.fallbacks import or_plain

_TYPES = {"f32", "f64", "i32", "i64", "ui32", "ui64"}
_SUM = "stablehlo.all_reduce"
_LOST = "Processes of one machine sum through sockets."


@or_plain(lambda target, handler, hosts: False, lost=_LOST)
def replace_sums(target: str, handler: Any, hosts: Sequence[Sequence[int]]) -> bool:
    """Has the sums of all programs over the given devices computed by a function of XLA's FFI.

    It lasts until the job ends. Returns whether this version of JAX allows it.

    Args:
        target: Name of the function in programs.
        handler: Capsule of the function. It is given arrays of one dtype and the attribute `slot`,
            which no other call of the program has; it returns the sums of each over the devices of
            the host. With the attribute `shares` it returns the arrays of the host's first device.
        hosts: Ids of the devices of each host, all of which a program must have. Several hosts sum
            within each first; the sums of their first devices are then left to XLA.
    """
    jax.ffi.register_ffi_target(target, handler, platform="cpu")
    wanted = sorted(number for host in hosts for number in host)
    firsts = {host[0] for host in hosts}

    def compile_with_sums(compile_: Callable, backend: Any, computation: Any, *args: Any) -> Any:
        ids = [device.id for device in args[3]]  # `executable_devices`.
        if backend.platform == "cpu" and sorted(ids) == wanted:
            leads = [number in firsts for number in ids] if len(hosts) > 1 else None
            computation = _with_calls(computation, target, len(wanted), leads)
        return compile_(backend, computation, *args)

    stand_around(compile_with_sums, outermost=True)
    return True


@or_plain(lambda module, target, num_devices, leads=None: module, lost=_LOST)
def _with_calls(
    module: Any, target: str, num_devices: int, leads: Sequence[bool] | None = None
) -> Any:
    """Returns the module with calls in place of its sums, or the module itself."""
    # Outside JAX's promise of compatibility. Checked with JAX 0.10.0, 0.10.2 and 0.12.0.
    from jax.extend.mlir import ir

    with module.context:
        if not any(_is_sum(op, num_devices) for op in _operations(module.operation)):
            return module
        code = io.BytesIO()
        module.operation.write_bytecode(code)
        copied = ir.Module.parse(code.getvalue())
        _call_each_once(ir, copied, num_devices)
        slots = itertools.count()
        for function in list(copied.body.operations):
            for group in _groups(function, num_devices):
                values = [operation.operands[0] for operation in group]
                summed = _call(ir, target, values, group[-1], slot=next(slots))
                if leads is not None:
                    between = [
                        _between_hosts(ir, operation, value, group[-1], leads)
                        for operation, value in zip(group, summed, strict=True)
                    ]
                    summed = _call(ir, target, between, group[-1], slot=next(slots), shares=1)
                for operation, result in zip(group, summed, strict=True):
                    operation.results[0].replace_all_uses_with(result)
                    operation.erase()
        return copied


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _is_sum(operation: Any, num_devices: int) -> bool:
    if operation.name != _SUM or len(operation.operands) != 1:
        return False
    body = [inner.operation.name for inner in operation.regions[0].blocks[0].operations]
    if body != ["stablehlo.add", "stablehlo.return"] or _dtype(operation) not in _TYPES:
        return False
    return _group_size(operation) == num_devices


def _group_size(operation: Any) -> int:
    groups = operation.attributes["replica_groups"]
    if "axis_ref" not in str(groups):
        return groups.type.shape[1]
    # JAX 0.12 names axes of a mesh.
    axes = {part.split('"')[1] for part in str(groups).split("axis_ref<")[1:]}
    name = str(groups).split("mesh = @")[1].split(",")[0]
    top = operation
    while top.parent is not None:
        top = top.parent
    inside = (inner.operation for inner in top.regions[0].blocks[0].operations)
    meshes = (x for x in inside if x.name == "sdy.mesh")
    (mesh,) = (x for x in meshes if _symbol(x, "sym_name") == name)
    size = 1
    for part in str(mesh.attributes["mesh"]).split("[")[1].split("]")[0].split(","):
        axis, _, length = part.strip().partition("=")
        if axis.strip('"') in axes:
            size *= int(length)
    return size


def _call_each_once(ir: Any, module: Any, num_devices: int) -> None:
    """Gives each call of a function with sums its own function, as two may run at once."""
    functions = {
        _symbol(function, "sym_name"): function
        for function in module.body.operations
        if function.operation.name == "func.func"
    }
    called: set[str] = set()

    @functools.cache
    def has_sums(name: str) -> bool:
        return any(
            has_sums(_symbol(x, "callee")) if x.name == "func.call" else _is_sum(x, num_devices)
            for x in _operations(functions[name].operation)
        )

    def visit(function: Any) -> None:
        for operation in list(_operations(function)):
            if operation.name != "func.call" or not has_sums(_symbol(operation, "callee")):
                continue
            name = _symbol(operation, "callee")
            own = functions[name].operation
            if name in called:
                own = own.clone()
                names = (f"{name}_sum_{number}" for number in itertools.count(len(called)))
                fresh = next(x for x in names if x not in functions)
                own.attributes["sym_name"] = ir.StringAttr.get(fresh)
                module.body.append(own)
                operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(fresh)
                functions[fresh], name = own, fresh
            called.add(name)
            visit(own)

    visit(functions["main"].operation)


def _symbol(operation: Any, attribute: str) -> str:
    return str(operation.attributes[attribute]).strip('"@')


def _groups(function: Any, num_devices: int) -> list[list[Any]]:
    """Returns the sums of a function in groups of independent ones, moved to follow one another."""
    groups: dict[Any, list[Any]] = {}
    for block in list(_blocks(function.operation)):
        operations = [operation.operation for operation in block.operations]
        sums = [x for x in operations if _is_sum(x, num_devices)]
        if not sums:
            continue
        # The number of sums that must come before a value is known, or an operation can run.
        levels: dict[Any, int] = {}
        places = []
        for place, operation in enumerate(operations[:-1]):
            inside = (value for x in _operations(operation) for value in x.operands)
            level = max((levels.get(x, 0) for x in (*operation.operands, *inside)), default=0)
            is_sum = operation.name == _SUM and operation in sums
            for result in operation.results:
                levels[result] = level + is_sum
            places.append((level, is_sum, _dtype(operation) if is_sum else "", place))
            if is_sum:
                groups.setdefault((id(block), level, _dtype(operation)), []).append(operation)
        if len(sums) > 1:
            for _, _, _, place in sorted(places):
                operations[place].move_before(operations[-1])
    return list(groups.values())


def _blocks(operation: Any) -> Iterator[Any]:
    """Yields the blocks inside an operation but those of sums."""
    for region in operation.regions:
        for block in region.blocks:
            yield block
            for inner in block.operations:
                if inner.operation.name != _SUM:
                    yield from _blocks(inner.operation)


def _dtype(operation: Any) -> str:
    return str(operation.operands[0].type.element_type)


def _call(ir: Any, target: str, values: Sequence[Any], before: Any, **numbers: int) -> list[Any]:
    types = [value.type for value in values]
    index, wide = ir.IndexType.get(), ir.IntegerType.get_signless(64)
    row_major = [np.arange(len(x.shape) - 1, -1, -1, dtype=np.int64) for x in types]
    layouts = ir.ArrayAttr.get([ir.DenseIntElementsAttr.get(x, type=index) for x in row_major])
    call = ir.Operation.create(
        "stablehlo.custom_call",
        results=types,
        operands=list(values),
        attributes={
            "call_target_name": ir.StringAttr.get(target),
            "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
            "backend_config": ir.DictAttr.get(
                {name: ir.IntegerAttr.get(wide, number) for name, number in numbers.items()}
            ),
            "operand_layouts": layouts,
            "result_layouts": layouts,
        },
        loc=before.location,
        ip=ir.InsertionPoint(before),
    )
    return list(call.results)


def _between_hosts(ir: Any, operation: Any, value: Any, before: Any, leads: Sequence[bool]) -> Any:
    """Returns the sum of a value over the first devices of all hosts, on those devices."""
    firsts = [index for index, leads_host in enumerate(leads) if leads_host]
    others = [[index] for index, leads_host in enumerate(leads) if not leads_host]
    groups = np.full((1 + len(others), len(firsts)), -1, np.int64)
    groups[0] = firsts
    groups[1:, :1] = others
    between = operation.clone(ir.InsertionPoint(before))
    between.operands[0] = value
    between.attributes["replica_groups"] = ir.DenseElementsAttr.get(groups)
    return between.results[0]
