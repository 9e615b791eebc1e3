"""Decides whether a function on batches treats each row by itself.

If so, it may run on some rows of the batch only.

The answer is read from the function's graph: a tensor is *rows* if its leading dimension is the
batch and row i depends on row i of the inputs alone. Operations that are not known to keep that
property make the answer no, so a yes is safe.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tnt_jax.data.tf import private

_ELEMENTWISE = frozenset(
    """Identity Cast Neg Abs Exp Expm1 Log Log1p Sqrt Rsqrt Square Reciprocal Inv Tanh Sigmoid
    Softplus Relu Relu6 Elu LogicalNot Floor
    Ceil Round Rint Sign Sin Cos IsNan IsFinite ZerosLike OnesLike StopGradient PreventGradient
    CheckNumerics StringLower StringUpper
    StringStrip StringToNumber AsString Erf Invert
    Add AddV2 Sub Mul RealDiv Div DivNoNan FloorDiv FloorMod Maximum Minimum Pow SquaredDifference
    Greater GreaterEqual Less LessEqual
    Equal NotEqual LogicalAnd LogicalOr SelectV2 ClipByValue BitwiseAnd BitwiseOr
    BitwiseXor""".split()
)
_RESIZES = frozenset(
    ["ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea", "AdjustContrastv2"]
)
_REDUCTIONS = frozenset(["Mean", "Sum", "Max", "Min", "Prod", "Any", "All", "ArgMax", "ArgMin"])


def why_not_rowwise(wrapper: Any) -> str | None:
    """Returns the operation of a dataset function that may not be row-wise, or None."""
    graph = private.graph_of(wrapper)
    num_arguments = len(graph.inputs) - len(graph.external_captures)
    rows = {id(tensor) for tensor in graph.inputs[:num_arguments]}
    if any(not _rank(tensor) for tensor in graph.inputs[:num_arguments]):
        return "an input of unknown rank"
    for operation in graph.get_operations():
        if not any(id(tensor) in rows for tensor in operation.inputs):
            continue
        if not _keeps_rows(operation, [id(tensor) in rows for tensor in operation.inputs]):
            return operation.type
        rows.update(id(tensor) for tensor in operation.outputs)
    return (
        None
        if all(id(tensor) in rows for tensor in graph.outputs)
        else "an output that does not depend on the rows"
    )


def _keeps_rows(operation: Any, are_rows: list[bool]) -> bool:
    kind = operation.type
    inputs = list(operation.inputs)
    if kind in _ELEMENTWISE:
        return _broadcasts_within_rows(inputs, are_rows)
    if not are_rows[0] and kind not in ("OneHot", "GatherV2", "LookupTableFindV2", "ConcatV2"):
        return False
    constant = [
        None if is_rows else tf.get_static_value(tensor)
        for tensor, is_rows in zip(inputs, are_rows, strict=True)
    ]
    if kind == "OneHot":
        return are_rows == [True, False, False, False] and operation.get_attr("axis") in (
            -1,
            *range(1, 9),
        )
    if kind == "Reshape":
        return _reshape_keeps_rows(inputs[0], operation.outputs[0], constant[1])
    if kind == "StridedSlice":
        return not any(are_rows[1:]) and _slice_keeps_rows(operation, constant[3])
    if kind == "ExpandDims":
        return constant[1] is not None and int(constant[1]) not in (0, -1 - _rank(inputs[0]))
    if kind == "Squeeze":
        axes = operation.get_attr("squeeze_dims")
        return bool(axes) and all(axis % _rank(inputs[0]) != 0 for axis in axes)
    if kind == "Transpose":
        return constant[1] is not None and constant[1][0] == 0
    if kind in _REDUCTIONS:
        return (
            constant[1] is not None
            and bool(np.size(constant[1]))
            and all(np.ravel(constant[1]) % _rank(inputs[0]) != 0)
        )
    if kind in ("Pad", "PadV2"):
        return constant[1] is not None and not constant[1][0].any()
    if kind == "ConcatV2":
        return (
            all(are_rows[:-1])
            and constant[-1] is not None
            and int(constant[-1]) % _rank(inputs[0]) != 0
        )
    if kind == "GatherV2":
        return (
            are_rows == [False, True, False] and constant[2] is not None and int(constant[2]) == 0
        )
    if kind == "LookupTableFindV2":
        return are_rows == [False, True, False]
    return kind in _RESIZES and are_rows[0] and not any(are_rows[1:]) and _rank(inputs[0]) == 4


def _broadcasts_within_rows(inputs: list[Any], are_rows: list[bool]) -> bool:
    """Returns whether broadcasting the other operands leaves each row by itself.

    It does if all rows have one rank, and no other operand has a leading dimension that meets
    theirs.
    """
    ranks = {_rank(tensor) for tensor, is_rows in zip(inputs, are_rows, strict=True) if is_rows}
    if len(ranks) != 1 or 0 in ranks:
        return False
    others = [tensor for tensor, is_rows in zip(inputs, are_rows, strict=True) if not is_rows]
    rank = ranks.pop()
    return all(
        tensor.shape.rank is not None
        and (tensor.shape.rank < rank or (tensor.shape.rank == rank and tensor.shape[0] == 1))
        for tensor in others
    )


def _reshape_keeps_rows(source: Any, result: Any, shape: Any) -> bool:
    """Returns whether a reshape is to `[-1, ...]` with as many elements per row as before."""
    if shape is None or shape[0] != -1:
        return False
    before, after = source.shape[1:], result.shape[1:]
    return (
        before.is_fully_defined()
        and after.is_fully_defined()
        and before.num_elements() == after.num_elements()
    )


def _slice_keeps_rows(operation: Any, strides: Any) -> bool:
    """Returns whether a slice takes all rows in front: `x[:, 1]`, `x[:, None]`, `x[..., 0]`."""
    if strides is None:
        return False

    def has(name: str, position: int) -> bool:
        return bool(operation.get_attr(f"{name}_mask") >> position & 1)

    if has("ellipsis", 0):
        num_dims = sum(not has("new_axis", position) for position in range(1, len(strides)))
        return num_dims < _rank(operation.inputs[0])
    is_whole = has("begin", 0) and has("end", 0) and strides[0] == 1
    return is_whole and not has("new_axis", 0) and not has("shrink_axis", 0)


def _rank(tensor: Any) -> int:
    """Returns the number of dimensions, 0 where it is unknown."""
    return tensor.shape.rank or 0
