"""A trainer whose ranks train in groups, each by itself, between outer updates of all.

Evaluation, prediction and everything that reads the state see the outer weights, on all ranks.
`of_group` is what trains: the same programs as without groups, on the devices of one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.base import Adapter, Variables
from tnt_jax.data.feed import rank_slice_of
from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.liveness.rendezvous import check_not_alone
from tnt_jax.distributed.sums.reduction import choose_reduction
from tnt_jax.log import logger
from tnt_jax.train.compiled_steps import CompiledSteps
from tnt_jax.train.contracts import Steps, TrainingStep
from tnt_jax.train.execution import DeviceBatches
from tnt_jax.train.finite import CHECKED
from tnt_jax.train.local.groups import Group, LocalSteps, join_group
from tnt_jax.train.local.outer import OuterUpdates
from tnt_jax.train.state import TrainState, state_arrays, with_arrays
from tnt_jax.train.steps.data_parallel import StepsOfSlice
from tnt_jax.train.trainer import OF_GROUPS, Trainer

_OWN, _SHARED = f"{OF_GROUPS}own/", f"{OF_GROUPS}all/"


class _Kept(NamedTuple):
    """Host copies of what a process of an elastic job trains."""

    shown: TrainState  # With the outer weights.
    own: dict[str, Any]  # Of its group by path, as in a checkpoint; empty if it trains in none.
    shared: dict[str, Any]  # What all groups had alike.
    updates: list[int]  # Of each fragment.


class LocalTrainer(Trainer):
    """Trains in groups, and shows the outer weights.

    The steps, on the mesh of all ranks, are those of evaluation and prediction; `threshold_kb` is
    that of `choose_reduction`, for sums within a group.
    """

    def __init__(
        self,
        adapter: Adapter,
        runtime: Runtime,
        steps: Steps,
        *,
        seed: int,
        sync: LocalSteps,
        threshold_kb: Any = None,
    ) -> None:
        self._group_trainer: GroupTrainer | None = None
        super().__init__(adapter, runtime, steps, seed=seed)
        self.sync, self._threshold_kb = sync, threshold_kb
        self._trains_alone = jax.process_count() == 1
        # Of the checkpoint that was restored.
        self._saved_groups = 1

    @property
    def of_group(self) -> Trainer:
        """The trainer of this process's group; all processes must ask for the first time together.

        Where there is one group, it is this one: there is nobody to exchange updates with.
        """
        if self._group_trainer is None and not self._trains_alone:
            group = join_group(self.sync.groups, self.runtime.mesh)
            self._trains_alone = group.num_groups == 1
            if not self._trains_alone:
                self._group_trainer = GroupTrainer(self, group, threshold_kb=self._threshold_kb)
        return self._group_trainer or self

    @property
    def state(self) -> TrainState | None:
        """The state with the outer weights; step, optimizer and key are those of this group."""
        group = self._group_trainer
        return group.shown() if group is not None and group.has_begun else super().state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        """Replaces the arrays that are others than those that are shown."""
        group = self._group_trainer
        if group is not None and group.has_begun and state is not None and group.take(state):
            return
        self._leave()
        self._state, self._coming = state, None

    def set_state(self, state: TrainState) -> None:
        """Puts a state of host or device arrays on every device; groups begin anew from it."""
        self._leave()
        super().set_state(state)

    def alike_state(self) -> TrainState:
        """Returns the state without what each group has for itself."""
        # Groups may leave different steps that are not finite.
        return replace(self.require_state(), opt_state=None, step=None)

    @property
    def loses_whole_groups(self) -> bool:
        """Whether a process that is lost is a group, and the others can form groups again."""
        group = self._group_trainer
        is_one_process = group is None or group.group.is_one_process
        return isinstance(self.sync.groups, str) and is_one_process

    def kept(self) -> _Kept:
        """Returns host copies, for `reopen`; what is under way between groups is taken back."""
        group, shown = self._group_trainer, super().kept()
        if group is None or not group.has_begun:
            return _Kept(shown, {}, {}, [])
        group.ahead.wait()
        return _Kept(shown, *group.host_copies())

    def reopen(self, runtime: Runtime, steps: Steps, kept: _Kept) -> None:
        """Goes on with other groups, each with the weights that it has kept."""
        self._leave()
        self._group_trainer, self._trains_alone = None, jax.process_count() == 1
        super().reopen(runtime, steps, kept.shown)
        group = self.of_group
        if isinstance(group, GroupTrainer):
            group.begin(kept.own, kept.shared, kept.updates)
        elif kept.own:
            # There is no other group left to share moves with.
            self.set_state(with_arrays(kept.shown, _below("state/", kept.own)))

    def follow(self, kept: _Kept, source: int) -> None:
        """Takes what process `source` has of the outer weights, and how far it has come."""
        group = self.of_group
        if not isinstance(group, GroupTrainer):
            super().follow(kept.shown, source)
            return
        arrays = collectives.broadcast(state_arrays(kept.shown), root=source)
        group.catch_up(with_arrays(kept.shown, arrays), source, is_new=not kept.own)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the further arrays of a checkpoint, of which one group alone needs none."""
        self._saved_groups = _num_groups(_below(_OWN, arrays))
        if self._saved_groups > 1:
            _warn_of_others(self._saved_groups, 1)

    def own_rows(self, tree: Any) -> Any:
        """Returns host arrays that were saved, summed over several groups."""
        return tree if self._saved_groups == 1 else _total(tree)

    def build_from(self, variables: Variables) -> None:
        """Creates the state from arrays, with which groups begin."""
        self._leave()
        super().build_from(variables)

    def _leave(self) -> None:
        if self._group_trainer is not None:
            self._group_trainer.leave()


class GroupTrainer(Trainer):
    """Trains on the ranks of this process's group; `whole` is the trainer of all ranks."""

    def __init__(self, whole: LocalTrainer, group: Group, *, threshold_kb: Any) -> None:
        job = replace(whole.runtime, mesh=group.mesh)
        reduction = choose_reduction(
            job.platform, job.num_ranks, settings=job.settings, threshold_kb=threshold_kb
        )
        rank_slice = replace(rank_slice_of(whole.runtime), num_groups=group.num_groups)
        # One by one: an outer update may follow any step.
        steps = StepsOfSlice(job, reduction, rank_slice)
        super().__init__(whole.adapter, job, steps, seed=whole._seed)
        self._whole, self.group = whole, group
        self._outer: OuterUpdates | None = None
        # Of the checkpoint that was restored.
        self._saved_groups = group.num_groups
        self._first_row = 0
        self._shown: TrainState | None = None
        # One device of each rank, by group.
        by_group = whole.runtime.mesh.devices.reshape(group.num_groups, -1)
        self._by_group = NamedSharding(
            Mesh(by_group, ("group", _jax.DATA_AXIS)), PartitionSpec("group")
        )
        self._everywhere = NamedSharding(whole.runtime.mesh, PartitionSpec())

    @property
    def has_begun(self) -> bool:
        """Whether the group has weights of its own."""
        return self._outer is not None

    @property
    def state(self) -> TrainState | None:
        """The state of the group, which begins with that of all ranks."""
        if self._state is None:
            self._begin()
        return self._state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        """Replaces the state of the group."""
        self._state, self._shown = state, None

    @property
    def programs(self) -> CompiledSteps:
        """The steps of training that `compile` has chosen for the trainer of all ranks."""
        whole, optimizer = self._whole.programs.step, self._whole._optimizer
        compiled, parts = self._compiled, whole.parts
        if compiled is None or compiled.parts is not parts or optimizer is not self._optimizer:
            assert optimizer is not None, "compile() comes first."
            self._optimizer = optimizer
            step = TrainingStep(parts, optimizer, on_nan=whole.on_nan)
            compiled = self._compiled = CompiledSteps(self.steps, step)
        return compiled

    @property
    def most_apart(self) -> int:
        """Steps by which a group may be ahead of another one."""
        return self._whole.sync.every + self._whole.sync.delay

    @property
    def round_bytes(self) -> int:
        """Bytes that each group sends to each other one in `every` steps."""
        return self._begun().round_bytes

    def leave(self) -> None:
        """Forgets the weights of the group; training begins with those of all ranks again."""
        if self._outer is not None:
            self._outer.leave()
        self._outer = self.state = None

    def shown(self) -> TrainState:
        """Returns the state with the outer weights, on all ranks."""
        outer, state = self._outer, self._state
        assert outer is not None and state is not None, "The group has begun."
        shown = self._shown
        if shown is None:
            shown = self._with_weights(state, outer.params | outer.averages)
            shown = self._shown = jax.tree.map(self._on_all, replace(shown, first_row=None))
        return shown

    def take(self, new: TrainState) -> bool:
        """Takes the arrays of a state that are not those shown; returns False if it is of others.

        Weights become the outer ones, and those of the group.
        """
        outer, state, shown = self._outer, self._state, self.shown()
        assert outer is not None and state is not None, "The group has begun."
        new = replace(new, first_row=None)
        if jax.tree.structure(new) != jax.tree.structure(shown):
            return False
        changed = {
            path: _jax.replicate(x, self.runtime.mesh)
            for (path, x), old in zip(
                state_arrays(new).items(), state_arrays(shown).values(), strict=True
            )
            if x is not old
        }
        own = state_arrays(replace(state, first_row=None))
        leaves = [changed.get(path, x) for path, x in own.items()]
        taken = jax.tree.structure(shown).unflatten(leaves)
        for path, x in _by_path(taken).items():
            for held in (outer.params, outer.averages):
                if path in changed and path in held:
                    held[path] = x.copy()
        self.state = replace(taken, first_row=state.first_row)
        return True

    def whole_sums(self, sums: Any) -> Any:
        """Returns the sums of an epoch over the rows of all groups; all processes must call it."""
        host = jax.tree.map(np.asarray, sums)
        if not self.group.is_lead:
            host = jax.tree.map(np.zeros_like, host)
        totals = jax.tree.map(
            lambda x, total: np.asarray(total, x.dtype), host, collectives.all_reduce(host)
        )
        return _jax.replicate(totals, self.runtime.mesh)

    def sums_after_loss(
        self, own: Sequence[np.ndarray], newest: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        """Returns the sums of this group's rows; those of a group that was lost are lost."""
        return own or [np.zeros_like(x) for x in newest]

    def end_training(self) -> None:
        """Makes the weights of all groups the outer ones, after an update of all of them."""
        outer, state = self._outer, self._state
        if outer is None or state is None:
            return
        with self._undone_by_errors(outer):
            params, averages = outer.close(*self._weights(state))
            self.state = self._with_weights(state, params | averages)

    def saved(self, sums: Any) -> tuple[Any, dict[str, Any]]:
        """Returns sums of an epoch and what else a checkpoint needs, with a row for each group."""
        check_not_alone("A checkpoint of local steps")
        rows = {f"{_OWN}{path}": self._row(x) for path, x in self._own_arrays().items()}
        shared = {f"{_SHARED}{path}": x for path, x in self._begun().shared_arrays().items()}
        return jax.tree.map(self._row, sums), rows | shared

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Goes on from arrays that `saved` returned; the state of all ranks has been restored.

        Other groups than those that were saved begin with the outer weights.
        """
        own, shared = _below(_OWN, arrays), _below(_SHARED, arrays)
        self._saved_groups = _num_groups(own)
        if own:  # Checkpoints of earlier versions lack it.
            shared.setdefault("num_steps", own["state/step"][0])
        if self._saved_groups == self.group.num_groups:
            self._take_back(self.own_rows(own), shared)
            return
        _warn_of_others(self._saved_groups, self.group.num_groups)
        if own:
            outer = self._begun()
            shared["under_way"] = shared["under_way"][:0]
            outer.restore(jax.device_get(outer.own_arrays()), shared)

    def host_copies(self) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
        """Returns what `begin` takes; what is under way between groups is taken back."""
        outer = self._begun()
        outer.recall()
        own, shared = jax.device_get((self._own_arrays(), outer.shared_arrays()))
        return own, shared, [*outer.updates]

    def begin(self, own: Mapping[str, Any], shared: Mapping[str, Any], updates: list[int]) -> None:
        """Begins with what a group has kept; without anything, with the state of all ranks."""
        outer = self._begun()
        if own:
            self._take_back(own, shared)
            outer.updates = [*updates]

    def catch_up(self, newest: TrainState, source: int, *, is_new: bool) -> None:
        """Goes on with the outer weights, and after the steps, of the group of process `source`.

        `newest` is its host state, with the outer weights, which the group takes if it `is_new` and
        has none of its own.
        """
        outer, state = self._begun(), self.require_state()
        kept = jax.device_get(outer.shared_arrays()), np.asarray(outer.updates)
        shared, updates = collectives.broadcast(kept, root=source)
        if is_new or int(shared["num_steps"]) != outer.num_steps:
            placed = _jax.replicate(newest, self.runtime.mesh)
            state = self._with_weights(placed, {} if is_new else _by_path(state))
        weights = outer.follow(shared, updates.tolist(), *self._weights(state))
        self.state = self._with_weights(state, weights[0] | weights[1])

    def own_rows(self, tree: Any) -> Any:
        """Returns the part of this group of host arrays with a row for each that was saved.

        Of other groups, the first has the sums of all.
        """
        index = self.group.index
        if self._saved_groups == self.group.num_groups:
            return jax.tree.map(lambda x: x[index], tree)
        total = tree if self._saved_groups == 1 else _total(tree)
        return total if index == 0 else jax.tree.map(np.zeros_like, total)

    def _own_arrays(self) -> dict[str, Any]:
        """Returns what the group has for itself, by path."""
        outer, state = self._begun(), replace(self.require_state(), first_row=None)
        return state_arrays({"state": state}) | {
            f"outer/{path}": x for path, x in outer.own_arrays().items()
        }

    def _take_back(self, own: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        """Goes on from host arrays like those of `_own_arrays`, and the shared ones."""
        outer, like = self._begun(), replace(self.require_state(), first_row=None)
        found = [own[f"state/{path}"] for path in state_arrays(like)]
        found = _jax.replicate(found, self.runtime.mesh)
        self.state = jax.tree.structure(like).unflatten(found)
        outer.restore(_below("outer/", own), shared)

    def _begun(self) -> OuterUpdates:
        """Returns the outer weights, with which the group begins if it has not yet."""
        _ = self.state
        assert self._outer is not None, "The state is that of a group that has begun."
        return self._outer

    def _begin(self) -> None:
        state = self._whole.require_state()
        own = _jax.replicate(state, self.runtime.mesh)
        weights, num_steps = self._weights(own), int(np.asarray(state.step))
        self._outer = OuterUpdates(self.group, self._whole.sync, *weights, num_steps=num_steps)
        self.state = own
        # What is shown from here on is that of the groups.
        self._whole._state = replace(state, params=None, model_state=None, opt_state=None)

    def _run(self, group: DeviceBatches, sums: Any) -> Any:
        outer = self._begun()
        with self._undone_by_errors(outer):
            first_row, num_rows = self._own_part(group)
            self._number_rows(first_row)
            sums = super()._run(group, sums)
            if CHECKED in sums:
                num_rows = _rows_taken(num_rows, sums[CHECKED])
            state = self.require_state()
            if outer.has_turn(num_rows):
                params, averages = outer.exchange(*self._weights(state))
                self.state = self._with_weights(state, params | averages)
        return sums

    @contextmanager
    def _undone_by_errors(self, outer: OuterUpdates) -> Iterator[None]:
        """Lets the group have the state before the block if another one is lost within it."""
        if link() is None:  # In a job that is not elastic, steps take the memory of that state.
            yield
            return
        state = self.require_state()
        try:
            with outer.undone_by_errors():
                yield
        except BaseException:
            self.state = state
            raise

    def _own_part(self, group: DeviceBatches) -> tuple[int, int]:
        """Returns the group's first row in a batch, and how many it has."""
        index = self.group.index
        if group.shards is not None:
            # Where each process brings its rows, they are numbered with the padding.
            own = [group.shards[process] for process in self.group.processes[index]]
            padded = jax.tree.leaves(group.batch.inputs)[0].shape[0]
            return index * padded, sum(rows.stop - rows.start for rows in own)
        part = -(-group.num_rows // self.group.num_groups)
        return index * part, min(max(group.num_rows - index * part, 0), part)

    def _with_real_rows(self, group: DeviceBatches) -> DeviceBatches:
        first, num_rows = self._own_part(group)
        rows = [slice(first, first + num_rows)]
        if group.shards is not None:
            rows = [group.shards[process] for process in self.group.processes[self.group.index]]
        own = tuple(slice(part.start - first, part.stop - first) for part in rows)
        return group._replace(shards=own, first_row=first)

    def _number_rows(self, first_row: int) -> None:
        """Sets the number of the group's first row in the global batch, for random numbers."""
        state = self.require_state()
        if state.first_row is None or first_row != self._first_row:
            number = _jax.replicate(np.uint32(first_row), self.runtime.mesh)
            self.state, self._first_row = replace(state, first_row=number), first_row

    def _weights(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the parameters, and the floating arrays of the model state, by path."""
        held = _by_path(state).items()
        return {path: x for path, x in held if path.startswith("params/")}, {
            path: x
            for path, x in held
            if path.startswith("model_state/") and jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
        }

    def _with_weights(self, state: TrainState, weights: Mapping[str, Any]) -> TrainState:
        leaves = [weights.get(path, x) for path, x in _by_path(state).items()]
        return replace(state, **jax.tree.structure(_variables(state)).unflatten(leaves))

    def _on_all(self, x: jax.Array) -> jax.Array:
        """Returns an array of the group as one of all ranks."""
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, self._everywhere, parts)

    def _row(self, x: Any) -> jax.Array:
        """Returns an array of which each group has a row."""
        x = x if isinstance(x, jax.Array) else _jax.replicate(x, self.runtime.mesh)
        rows: Sequence[Any] = [shard.data[None] for shard in x.addressable_shards]
        shape = (self.group.num_groups, *x.shape)
        return jax.make_array_from_single_device_arrays(shape, self._by_group, rows)


@jax.jit
def _rows_taken(num_rows: int, counts: jax.Array) -> jax.Array:
    """Returns the rows of a step, by which it weighs in the mean; 0 if it was left."""
    return jnp.where(counts[0] == 0, num_rows, 0)


def _variables(state: TrainState) -> dict[str, Any]:
    return {"params": state.params, "model_state": state.model_state}


def _by_path(state: TrainState) -> dict[str, Any]:
    """Returns parameters and model state by path, as `state_arrays` of the state does."""
    return state_arrays(_variables(state))


def _num_groups(own: Mapping[str, np.ndarray]) -> int:
    """Returns how many groups have a row in the arrays of a checkpoint; one has none."""
    return len(next(iter(own.values()))) if own else 1


def _total(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), tree)


def _warn_of_others(saved: int, found: int) -> None:
    logger.warning(
        "The checkpoint is that of %d group(s) of LocalSteps, and there are %d: they begin with "
        "its outer weights and the optimizer state of its first group. What its groups had trained "
        "and not yet sent is left out.",
        saved,
        found,
    )


def _below(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {path.removeprefix(prefix): x for path, x in arrays.items() if path.startswith(prefix)}
