"""The outer weights, which all groups share, and their updates from the moves of all groups.

outer = OuterUpdates(group, sync, params, averages)
...  # A step of the group.
if outer.has_turn(rows):
    params, averages = outer.exchange(params, averages)
"""

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.data.feed import make_put
from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.host.comparison import compare
from tnt_jax.distributed.host.links import Links, Message
from tnt_jax.distributed.joining.runtime import init
from tnt_jax.distributed.liveness.phases import calling
from tnt_jax.train.local.fragments import (
    message_bytes,
    packed,
    plan_fragments,
    sent_after,
    unpacked,
)
from tnt_jax.train.local.groups import Group, LocalSteps, join_group
from tnt_jax.train.state import copied, digest, state_arrays

Arrays = dict[str, jax.Array]
# What sending and updating change.
_CHANGES = ("params", "averages", "updates", "_opt_states", "_residual", "_rows", "_steps")
_CHANGES += ("_under_way", "_came", "_before", "num_steps")
# The group's part of the weights after an update that was under way while it trained on: alpha of
# Streaming DiLoCo, section 2.3 and figure 9.
_OWN_PART = 0.5


class _Sent(NamedTuple):
    """A fragment under way, and the step after which its update is due."""

    fragment: int
    due: int


class OuterUpdates:
    """The outer weights on the devices of one group, which begin as those of all groups.

    Besides parameters there are averages: floating arrays that groups compute themselves, such as
    BatchNorm's moving statistics. They travel with the last fragment, uncompressed, and become the
    mean of the groups'. `updates` are how often each fragment was updated, `num_steps` how many
    steps each group has made, counted from a given number.
    """

    def __init__(
        self,
        group: Group,
        sync: LocalSteps,
        params: Arrays,
        averages: Arrays,
        *,
        num_steps: int = 0,
    ) -> None:
        for path, x in params.items():
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise TypeError(
                    f"LocalSteps averages parameters of real floating numbers, but {path} is "
                    f"{x.dtype}. Keep it out of the parameters that are trained."
                )
        self.num_steps = num_steps
        self._group, self._sync = group, sync
        self._optimizer = sync.transformation(has_statistics=bool(averages))
        # Within programs, JAX sorts the keys of a dict.
        paths = sorted(params)
        self._fragments = [
            [paths[index] for index in part]
            for part in plan_fragments([params[path].nbytes for path in paths], sync.fragments)
        ]
        self.params, self.averages = copied(params), copied(averages)
        self._opt_states = [self._optimizer.init(self._part(p)) for p in range(sync.fragments)]
        self._residual = {}
        if sync.compress != "none":
            self._residual = {path: jnp.zeros(x.shape, jnp.float32) for path, x in params.items()}
        self._opt_states, self._residual = _jax.replicate(
            (self._opt_states, self._residual), group.mesh
        )
        # Rows and steps since each fragment was sent.
        self._rows: list[Any] = [np.float32(0)] * sync.fragments
        self._steps = [0] * sync.fragments
        self.updates = [0] * sync.fragments
        self._under_way: deque[_Sent] = deque()
        # Rows, steps and residual before each of these was sent, in an elastic job.
        self._before: dict[int, tuple[np.float32, int, Arrays]] = {}
        # Messages of all groups that have come before they were due, `[groups, bytes]`.
        self._came: deque[np.ndarray] = deque()
        self._links = Links(group.leads, "outer updates") if group.is_lead else None
        if self._links is not None:
            # Its threads would outlive a model that is dropped.
            weakref.finalize(self, self._links.close).atexit = False
        whole = NamedSharding(group.mesh, PartitionSpec())
        self._send = jax.jit(self._message, static_argnums=0, out_shardings=whole)
        self._apply = jax.jit(self._updated, static_argnums=0, out_shardings=whole)
        self._copy = jax.jit(copied, out_shardings=whole)
        self._put_rows = make_put(group.mesh)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this process has sent to other groups; 0 if another one does it."""
        return 0 if self._links is None else self._links.sent_bytes

    @property
    def round_bytes(self) -> int:
        """Bytes that each group sends to each other one in `every` steps."""
        return sum(self._message_bytes(fragment) for fragment in range(self._sync.fragments))

    def has_turn(self, rows: Any) -> bool:
        """Counts a step of the group on so many rows; returns whether `exchange` must follow.

        Only the devices may know how many, of a step that may have been left.
        """
        if link() is not None:  # The devices may be left before they are sent.
            rows = int(rows)
        self.num_steps += 1
        self._rows = [before + rows for before in self._rows]
        self._steps = [steps + 1 for steps in self._steps]
        return self._is_due or bool(self._to_send)

    def exchange(self, params: Arrays, averages: Arrays) -> tuple[Arrays, Arrays]:
        """Sends and takes the fragments whose turn it is; returns what the group goes on with."""
        for fragment in self._to_send:
            self._start(fragment, params, averages)
        while self._is_due:
            params, averages = self._finish(params, averages)
        return params, averages

    def close(self, params: Arrays, averages: Arrays) -> tuple[Arrays, Arrays]:
        """Returns parameters and averages of all groups, after a last update of every fragment."""
        while self._under_way:
            params, averages = self._finish(params, averages)
        # Those of which each group has made moves since they were sent.
        for fragment in (p for p, steps in enumerate(self._steps) if steps):
            self._start(fragment, params, averages)
            params, averages = self._finish(params, averages)
        return self._copy(self.params), self._copy(self.averages)

    @contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """Undoes what has changed within the block if that ends by an error."""
        kept = {name: copy(getattr(self, name)) for name in _CHANGES}
        try:
            yield
        except BaseException:
            vars(self).update(kept)
            raise

    def recall(self) -> None:
        """Takes back what is under way, for groups that go on without one of them.

        Parameters do not change when they are sent, so the next turn of a fragment sends it all.
        """
        for fragment, _ in self._under_way:
            # They were sent by an interrupted run.
            rows, steps, residual = self._before.pop(fragment, (np.float32(0), 0, {}))
            self._rows[fragment] += rows
            self._steps[fragment] += steps
            self._residual |= residual
        self._under_way.clear()
        self._came.clear()

    def follow(
        self, shared: Mapping[str, Any], updates: Sequence[int], own: Arrays, averages: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Returns parameters and averages of this group to go on with, after those of another one.

        That one's `shared_arrays` are on the host, with nothing under way; of its `updates` this
        group may lack the last ones.
        """
        missed = [p for p, number in enumerate(updates) if number > self.updates[p]]
        self.restore(jax.device_get(self.own_arrays()), shared)
        self.updates = list(updates)
        for fragment in missed:
            # The others have had the moves of this group.
            self._rows[fragment] = np.float32(0)
            part = self._part(fragment)
            zeros = {path: jnp.zeros_like(x) for path, x in self._residual.items() if path in part}
            self._residual |= _jax.replicate(zeros, self._group.mesh)
            means = self._averages_of(fragment, self.averages)
            own = own | {path: self._blended(own[path], x) for path, x in part.items()}
            averages = averages | {p: self._blended(averages[p], x) for p, x in means.items()}
        return own, averages

    def own_arrays(self) -> dict[str, Any]:
        """Returns what each group has for itself, by path: scalars and arrays on its devices."""
        rows = {str(fragment): np.float32(x) for fragment, x in enumerate(self._rows)}
        return state_arrays({"residual": self._residual, "rows": rows})

    def shared_arrays(self) -> dict[str, Any]:
        """Returns what all groups have alike, by path, once what is under way has come."""
        while len(self._came) < len(self._under_way):
            self._came.append(self._taken(self._under_way[len(self._came)].fragment))
        under_way = np.array([*map(tuple, self._under_way)], np.int64).reshape(-1, 2)
        return {
            **state_arrays({"outer": dict(enumerate(self._opt_states))}),
            **{f"params/{path}": x for path, x in self.params.items()},
            **{f"averages/{path}": x for path, x in self.averages.items()},
            **{f"came/{number}": message for number, message in enumerate(self._came)},
            "under_way": under_way,
            "steps": np.array(self._steps),
            "num_steps": np.array(self.num_steps),
        }

    def restore(self, own: Mapping[str, np.ndarray], shared: Mapping[str, np.ndarray]) -> None:
        """Goes on from what `own_arrays` and `shared_arrays` returned, as host arrays."""
        put = partial(_jax.replicate, mesh=self._group.mesh)

        def like(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
            paths = state_arrays(tree)
            if missing := [path for path in paths if path not in arrays]:
                raise ValueError(
                    f"The checkpoint lacks {missing[0]!r}, which these local steps need. Pass the "
                    "outer optimizer, fragments and compression that it was trained with."
                )
            return jax.tree.structure(tree).unflatten([put(arrays[path]) for path in paths])

        self._residual = like({"residual": self._residual}, own)["residual"]
        self._rows = [np.float32(own[f"rows/{part}"]) for part in range(len(self._rows))]
        self._steps = [int(steps) for steps in shared["steps"]]
        self.num_steps = int(shared["num_steps"])
        outer = like({"outer": dict(enumerate(self._opt_states))}, shared)["outer"]
        self._opt_states = [outer[fragment] for fragment in range(len(outer))]
        self.params = {path: put(shared[f"params/{path}"]) for path in self.params}
        self.averages = {path: put(shared[f"averages/{path}"]) for path in self.averages}
        self._under_way = deque(_Sent(*map(int, pair)) for pair in shared["under_way"])
        self._came = deque(shared[f"came/{n}"] for n in range(len(self._under_way)))
        self._before = {}

    def leave(self) -> None:
        """Ends the connections to the other groups."""
        if self._links is not None:
            self._links.close()

    @property
    def _to_send(self) -> list[int]:
        return sent_after(self.num_steps, every=self._sync.every, fragments=self._sync.fragments)

    @property
    def _is_due(self) -> bool:
        return bool(self._under_way) and self._under_way[0].due <= self.num_steps

    def _part(self, fragment: int) -> Arrays:
        return {path: self.params[path] for path in self._fragments[fragment]}

    def _averages_of(self, fragment: int, averages: Arrays) -> Arrays:
        return averages if fragment == self._sync.fragments - 1 else {}

    def _start(self, fragment: int, params: Arrays, averages: Arrays) -> None:
        own = {path: params[path] for path in self._fragments[fragment]}
        before = {path: x for path, x in self._residual.items() if path in own}
        message, residual = self._send(
            fragment,
            own,
            self._part(fragment),
            before,
            self._averages_of(fragment, averages),
            self._rows[fragment],
        )
        made: Any = message.addressable_data(0)
        if link() is not None:
            self._before[fragment] = self._rows[fragment], self._steps[fragment], before
            made = np.array(made)  # The devices may be left before it is sent.
        self._residual |= residual
        self._rows[fragment], self._steps[fragment] = np.float32(0), 0
        self._under_way.append(_Sent(fragment, self.num_steps + self._sync.delay))
        if self._links is not None:
            self._links.post(lambda: np.asarray(made).tobytes())

    def _finish(self, params: Arrays, averages: Arrays) -> tuple[Arrays, Arrays]:
        """Updates the oldest fragment that is under way, with the messages of all groups."""
        fragment = self._under_way[0].fragment
        messages = self._came.popleft() if self._came else self._taken(fragment)
        self._under_way.popleft()
        self._before.pop(fragment, None)
        self.updates[fragment] += 1
        if not self._group.is_one_process:
            local = np.zeros((len(_jax.local_ranks(self._group.mesh)), *messages.shape), np.uint8)
            if self._links is not None:
                local[0] = messages
            messages = self._put_rows(local)
        else:
            messages = _jax.replicate(messages, self._group.mesh)
        own = {path: params[path] for path in self._fragments[fragment]}
        mean = self._averages_of(fragment, averages)
        new_own, new_outer, opt_state, new_averages, outer_averages = self._apply(
            fragment, own, self._part(fragment), self._opt_states[fragment], mean, messages
        )
        self._opt_states[fragment] = opt_state
        self.params, self.averages = self.params | new_outer, self.averages | outer_averages
        return params | new_own, averages | new_averages

    def _taken(self, fragment: int) -> np.ndarray:
        """Returns the messages of all groups, `[groups, bytes]`; zeros where another takes them."""
        size = self._message_bytes(fragment)
        if self._links is None:
            return np.zeros((self._group.num_groups, size), np.uint8)
        messages: list[Message] = self._links.take()
        for lead, message in zip(self._group.leads, messages, strict=True):
            assert len(message) == size, f"Process {lead} sent {len(message)} of {size} bytes."
        return np.stack([np.frombuffer(message, np.uint8) for message in messages])

    def _shapes(self, fragment: int) -> tuple[list[Any], list[Any]]:
        averages = self._averages_of(fragment, self.averages)
        return [x.shape for x in self._part(fragment).values()], [
            x.shape for x in averages.values()
        ]

    def _message_bytes(self, fragment: int) -> int:
        moves, averages = self._shapes(fragment)
        return message_bytes(moves, self._sync.compress) + message_bytes(averages, "none")

    def _message(
        self, fragment: int, own: Any, outer: Any, residual: Any, averages: Any, rows: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the message of a fragment, and what compression leaves out of it."""
        moves = {path: _float32(outer[path]) - _float32(own[path]) for path in outer}
        moves = {path: move + residual[path] if residual else move for path, move in moves.items()}
        message = packed(rows, list(moves.values()), self._sync.compress)
        shapes = [move.shape for move in moves.values()]
        if residual:
            _, sent = unpacked(message, shapes, self._sync.compress)
            residual = {
                path: move - part for (path, move), part in zip(moves.items(), sent, strict=True)
            }
        others = packed(rows, list(map(_float32, averages.values())), "none")
        return jnp.concatenate([message, others]), residual

    def _updated(
        self, fragment: int, own: Any, outer: Any, opt_state: Any, averages: Any, messages: Any
    ) -> Any:
        """Returns the group's and the outer parameters, the optimizer's state, and averages."""
        if messages.ndim == 3:  # Of the ranks of a group, one has them and the others zeros.
            messages = jnp.sum(messages, axis=0, dtype=jnp.uint8)
        shapes, shapes_of_averages = self._shapes(fragment)
        first = message_bytes(shapes, self._sync.compress)
        found = [
            (
                *unpacked(x[:first], shapes, self._sync.compress),
                unpacked(x[first:], shapes_of_averages, "none")[1],
            )
            for x in messages
        ]
        # Moves on no rows at all have no weight.
        total = jnp.maximum(sum(rows for rows, _, _ in found), 1)
        shares = [rows / total for rows, _, _ in found]

        def mean(which: int, like: Mapping[str, Any]) -> dict[str, Any]:
            columns = zip(*(message[which] for message in found), strict=True)
            sums = [
                jnp.asarray(sum(share * x for share, x in zip(shares, column, strict=True)))
                for column in columns
            ]
            return {path: x.astype(like[path].dtype) for path, x in zip(like, sums, strict=True)}

        updates, opt_state = self._optimizer.update(mean(1, outer), opt_state, outer)
        new_outer: Any = optax.apply_updates(outer, updates)
        new_averages = mean(2, averages)
        return (
            jax.tree.map(self._blended, own, new_outer),
            new_outer,
            opt_state,
            jax.tree.map(self._blended, averages, new_averages),
            new_averages,
        )

    def _blended(self, own: jax.Array, new: jax.Array) -> jax.Array:
        """Returns the group's array after an update; a distinct one, which the step may take."""
        return jnp.copy(_OWN_PART * own + (1 - _OWN_PART) * new if self._sync.delay else new)


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


_ADVICE = "Pass the same LocalSteps, and seed all alike or take one's: tnt.broadcast_state(params)."


class OuterLoop:
    """The outer updates of a custom training loop; `tnt_jax.local_steps` makes it.

    Attributes:
        group: Number of this process's group.
        num_groups: Number of groups. With one, parameters stay what steps make of them.
        mesh: Mesh of the axis `data` over the devices of the group.
    """

    def __init__(self, params: Any, sync: LocalSteps) -> None:
        sums = {f"params/{p}": digest(_jax.key_words(x)) for p, x in state_arrays(params).items()}
        settings = {name: value for name, value in vars(sync).items() if name != "outer"}
        compare("local_steps", sums | settings, advice=_ADVICE)
        group = join_group(sync.groups, init().mesh)
        self.group, self.num_groups, self.mesh = group.index, group.num_groups, group.mesh
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
        return copied(held)

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
        if self._outer is None:
            self._params = params
        elif self._outer.has_turn(rows):
            own, _ = self._outer.exchange(state_arrays(params), {})
            return self._tree(own)
        return params

    def end(self, params: Any) -> Any:
        """Returns the parameters of all groups, after an update of every fragment."""
        if self._outer is None:
            return params
        return self._tree(self._outer.close(state_arrays(params), {})[0])

    def _tree(self, arrays: dict[str, jax.Array]) -> Any:
        return self._structure.unflatten([arrays[path] for path in self._paths])


@calling("local_steps")
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
        ValueError: On every process, if the groups are invalid, there are fewer arrays than
            fragments, or parameters or settings but the outer optimizer differ between processes.
    """
    return OuterLoop(params, sync)
