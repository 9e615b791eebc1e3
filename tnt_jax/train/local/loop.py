"""Outer updates for custom training loops, around any step of a group."""

from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.distributed.joining.runtime import init
from tnt_jax.distributed.liveness.phases import called
from tnt_jax.train.local.groups import LocalSteps, join_group
from tnt_jax.train.local.outer import OuterUpdates
from tnt_jax.train.state_arrays import state_arrays


class OuterLoop:
    """The outer updates of a custom training loop; `tnt_jax.local_steps` makes it.

    Attributes:
        group: Number of this process's group.
        num_groups: Number of groups. With one, parameters stay what steps make of them.
        mesh: Mesh of the axis `data` over the devices of the group.
    """

    def __init__(self, params: Any, sync: LocalSteps) -> None:
        group = join_group(sync.groups, init().mesh)
        self.group, self.num_groups, self.mesh = group.index, group.num_groups, group.mesh
        self._step = 0
        params = _jax.replicate(params, group.mesh)
        arrays, self._structure = state_arrays(params), jax.tree.structure(params)
        self._paths = [*arrays]
        self._params, self._outer = params, None
        if group.num_groups > 1:
            self._params, self._outer = None, OuterUpdates(group, sync, arrays, {})

    @property
    def params(self) -> Any:
        """Copies of the parameters to begin with, and then of the outer ones, alike in all groups.

        A step may be given them as donated.
        """
        held = self._params if self._outer is None else self._tree(self._outer.params)
        return jax.tree.map(jnp.copy, held)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this process has sent to other groups."""
        return 0 if self._outer is None else self._outer.sent_bytes

    def __call__(self, params: Any, *, rows: int) -> Any:
        """Returns the group's parameters to go on with, to be called after each step.

        Args:
            params: Parameters after the step, on the devices of the group.
            rows: Rows that the group has trained on in this step: its weight in the mean.
        """
        self._step += 1
        if self._outer is None:
            self._params = params
        elif self._outer.has_turn(self._step, rows):
            own, _ = self._outer.exchange(self._step, state_arrays(params), {})
            return self._tree(own)
        return params

    def end(self, params: Any) -> Any:
        """Returns the parameters of all groups, after an update of every fragment."""
        if self._outer is None:
            return params
        return self._tree(self._outer.close(self._step, state_arrays(params), {})[0])

    def _tree(self, arrays: dict[str, jax.Array]) -> Any:
        return self._structure.unflatten([arrays[path] for path in self._paths])


@called("local_steps")
def local_steps(params: Any, sync: LocalSteps) -> OuterLoop:
    """Begins local steps with outer updates (DiLoCo) in a custom training loop.

    ```python
    outer = tnt.local_steps(params, tnt.LocalSteps(every=50))
    params = outer.params
    for x, y in batches_of(outer.group, outer.num_groups):  # Rows of this group alone.
        params, opt_state = step(params, opt_state, x, y)
        params = outer(params, rows=len(x))
    params = outer.end(params)
    ```

    It is another algorithm than data parallelism; see docs/local_steps.md. All processes must call
    it, and make equally many steps.

    Args:
        params: Pytree of floating arrays, the same on every process.
        sync: Groups, and how they exchange updates.

    Raises:
        TypeError: If a parameter is not of real floating numbers.
        ValueError: On every process, if the groups are invalid, or there are fewer arrays than
            fragments.
    """
    return OuterLoop(params, sync)
