"""The state of a custom training loop on the devices: the same on every rank of every process."""

import zlib
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.nnx import check_unshared
from tnt_jax.distributed.host import collectives


class Placement:
    """Puts the state of the step `name` on every device of a mesh, unless it lies there already."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        self._name = name
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, PartitionSpec())
        # By identity, with which a step of a small model is found in place fastest.
        self._known: dict[int, Any] = {}

    def place(self, state: Any) -> Any:
        """Returns a state on every device; of one that lies elsewhere, a copy.

        A TypeError says that an NNX variable occurs twice in it, or that it is traced, a ValueError
        that an earlier step was given it, or that processes come with different states.
        """
        known = self._known
        leaves = jax.tree.leaves(state)
        if leaves and isinstance(leaves[0], Tracer):
            raise TypeError(
                f"{self._name} is a program of its own and cannot be traced: call it outside of "
                f"jax.jit, jax.lax.scan and other steps. Many steps in one program are "
                f"{self._name}.scan(state, batches) with batches of dataset.stacked()."
            )
        for x in leaves:
            if id(getattr(x, "sharding", None)) not in known or x.is_deleted():
                return self._placed(state, leaves)
        return state

    def _placed(self, state: Any, leaves: list[Any]) -> Any:
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        if any(x.is_deleted() for x in arrays):
            # JAX may end the process where it is given such arrays.
            raise _given_away(self._name, state)
        whole = self._sharding
        if len(arrays) == len(leaves) and all(
            x.sharding.is_equivalent_to(whole, x.ndim) for x in arrays
        ):
            self._known |= {id(x.sharding): x.sharding for x in arrays}
            return state
        check_unshared(state)
        state = jax.tree.map(_jax.local_copy, state)
        self._check_equal(state)
        return _jax.replicate(state, self._mesh)

    def _check_equal(self, state: Any) -> None:
        if jax.process_count() == 1:
            return
        sums = {
            jax.tree_util.keystr(path): _checksum(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        first = None
        for process, other in enumerate(collectives.agree(self._name, {}, note=sums)):
            first = other if first is None else first
            differing = [path for path in {**first, **other} if first.get(path) != other.get(path)]
            if differing:
                raise ValueError(
                    f"{self._name} needs the same state on every process, but state{differing[0]} "
                    f"({len(differing)} of {len(first)} arrays) of process {process} differs from "
                    f"that of process 0. Seed all alike, or take one's: "
                    f"state = tnt_jax.broadcast_state(state)."
                )


def _given_away(name: str, state: Any) -> ValueError:
    path = next(
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if isinstance(x, jax.Array) and x.is_deleted()
    )
    return ValueError(
        f"The state{path} was given to an earlier step, which has used its memory again (donated "
        f"it). Go on with the state that the step returned: state, metrics = {name}(state, batch)."
    )


def _checksum(x: Any) -> str:
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.ascontiguousarray(x)
    return f"{array.dtype}{array.shape} {zlib.crc32(array.tobytes())}"
