"""The host's side of training: which batch next, which step to start, and what may be read when.

`Trainer` needs no facade: given an adapter, step parts and an optimizer it trains on any iterable of batches.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tnt_jax import _jax, collectives, overlap, reproducible, sharded_update
from tnt_jax.adapters.base import Adapter, Variables
from tnt_jax.data.feed import Feed, make_placer, place_of
from tnt_jax.data.sources import HostBatch
from tnt_jax.execution import Placed, in_groups, mapped, one_by_one, scanned, stack
from tnt_jax.log import logger
from tnt_jax.reduction import Reduction, default_reduction
from tnt_jax.runtime import Runtime
from tnt_jax.state import TrainState, create_state
from tnt_jax.step import Batch, Parts, make_eval_step, make_predict_step, make_train_step, make_train_steps, zero_sums
from tnt_jax.virtual_ranks import VirtualRanks

# Steps that the host may be ahead of the devices. Each holds a batch, and virtual CPU devices deadlock with too many.
_IN_FLIGHT = 4


class Hooks(Protocol):
    """What the caller of a loop wants to do between steps."""

    def on_batch_begin(self, index: int) -> None:
        """Runs before step `index` of the epoch; of steps that share a program, before the first."""
        ...

    def on_batch_end(self, index: int, sums: Any, num_rows: int) -> bool:
        """Runs after step `index`, the last of its program, was started; returns whether to stop. Reading `sums` waits for it."""
        ...


class Trainer:
    """A model on the devices, with the compiled steps that change and read it.

    Args:
        adapter: Model as pure functions.
        runtime: Mesh to train on.
        seed: Seed of fresh variables and of the random streams of the step.
        owner: Trainer whose state this one reads, for another model over the same variables; None for a state of its own.
        reduction: How gradients are summed over the ranks; as is best on these devices by default.
        virtual_ranks: Number of virtual ranks, for the same bits on every number of devices; None for the fast steps.

    Attributes:
        place: The part of the data axis, in ranks or virtual ranks, that this process feeds.
    """

    def __init__(
        self,
        adapter: Adapter,
        runtime: Runtime,
        *,
        seed: int,
        owner: "Trainer | None" = None,
        reduction: Reduction | None = None,
        virtual_ranks: int | None = None,
    ) -> None:
        self.adapter, self.runtime, self.owner = adapter, runtime, owner
        if reduction is None:
            reduction = default_reduction(runtime.platform, runtime.num_ranks, jax.process_count())
        self.reduction = reduction
        self._state: TrainState | None = None
        self._seed = seed
        self._stacked = NamedSharding(runtime.mesh, PartitionSpec(None, _jax.DATA_AXIS))
        self._place, self._place_stacked = make_placer(runtime.mesh), make_placer(runtime.mesh, stacked=True)
        self.virtual_ranks = None if virtual_ranks is None else VirtualRanks(virtual_ranks, runtime.mesh)
        if self.virtual_ranks is None:
            self.place = place_of(runtime)
            self._predict_step = make_predict_step(adapter.apply, runtime.mesh)
            self._predict_steps = mapped(self._predict_step, self._stacked)
        else:
            self.place = self.virtual_ranks.place
            self._predict_step = reproducible.make_predict_step(adapter.apply, self.virtual_ranks)
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(runtime.mesh, PartitionSpec()))
        self._optimizer: optax.GradientTransformation | None = None
        self._accumulation_steps = 1
        self._parts: Parts | None = None
        self._train_step: Callable | None = None
        # Several steps as one program, made when the first such batch comes.
        self._make_train_steps: Callable[[], Callable] | None = None
        self._train_steps: Callable | None = None
        self._eval_step: Callable | None = None
        self._eval_steps: Callable | None = None
        self._zeros: dict[Any, Any] = {}

    @property
    def state(self) -> TrainState | None:
        """Everything that training changes; None before `build`."""
        return self._state if self.owner is None else self.owner.state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        """Replaces everything that training changes."""
        assert self.owner is None, "The state belongs to the owner."
        self._state = state

    def build(self, inputs: Any) -> None:
        """Creates the variables, if there are none, for inputs like `inputs`; process 0's values are everybody's."""
        if self.owner is not None:
            if self.state is None:
                raise RuntimeError("The model that this view was made from has no variables yet: build or train it first.")
            self.adapter.attach(inputs)
        elif self.state is None:
            variables = self.adapter.init(inputs, seed=self._seed)
            params, model_state = collectives.broadcast(tuple(variables))
            self._create_state(Variables(params, model_state))

    def require_state(self) -> TrainState:
        """Returns the state, of a model that was built or can build itself.

        Raises:
            RuntimeError: If the model has no variables yet.
        """
        if self.state is None and (inputs := self.adapter.sample_inputs()) is not None:
            self.build(inputs)
        if self.state is None:
            raise RuntimeError("The model has no variables yet. Call build(shape_or_sample), or fit, evaluate or predict first.")
        return self.state

    def build_from(self, variables: Variables) -> None:
        """Creates the state from host arrays, the same on every process, in the form in which `adapter.init` returns variables."""
        self._create_state(variables)

    def compile(self, parts: Parts, optimizer: optax.GradientTransformation, *, accumulation_steps: int = 1) -> None:
        """Chooses what the steps compute, and starts the optimizer unless it runs already; parameters and model state stay.

        Args:
            parts: Forward pass, loss and metrics.
            optimizer: Optax transformation.
            accumulation_steps: Steps whose mean gradient makes one update.
        """
        mesh = self.runtime.mesh
        self._parts, self._zeros, self._train_steps = parts, {}, None
        if self.virtual_ranks is None:
            if self.reduction.by_ring:
                overlap.connect()
            arguments = {"reduction": self.reduction, "accumulation_steps": accumulation_steps}
            self._train_step = make_train_step(parts, optimizer, mesh, **arguments)
            self._make_train_steps = partial(make_train_steps, parts, optimizer, mesh, **arguments)
            self._eval_step = make_eval_step(parts, mesh)
            self._eval_steps = scanned(self._eval_step, self._stacked)
        else:
            ranks = self.virtual_ranks
            self._train_step = reproducible.make_train_step(parts, optimizer, ranks, accumulation_steps=accumulation_steps)
            self._eval_step = reproducible.make_eval_step(parts, ranks)
        self.use_optimizer(optimizer, accumulation_steps=accumulation_steps)

    def use_optimizer(self, optimizer: optax.GradientTransformation, *, accumulation_steps: int = 1) -> None:
        """Starts an optimizer afresh, unless it is the one that the state belongs to.

        Args:
            optimizer: Optax transformation.
            accumulation_steps: Steps whose mean gradient makes one update.
        """
        if optimizer is self._optimizer and accumulation_steps == self._accumulation_steps:
            return
        self._optimizer, self._accumulation_steps = optimizer, accumulation_steps
        if self.state is not None and self.owner is None:
            self._create_state(self.variables())

    def host_sums(self, leaves: Sequence[np.ndarray], batch: Batch) -> Any:
        """Returns sums of an epoch with given leaves, for host batches like `batch`.

        Args:
            leaves: Leaves of sums that `train_epoch` returned, on the host.
            batch: Batch of this process's rows.
        """
        structure = jax.tree.structure(self._zero_sums(Placed(self._place(batch), 0)))
        return self._replicate(structure.unflatten(leaves))

    def set_state(self, state: TrainState) -> None:
        """Places a state of host or device arrays on every device."""
        mesh = self.runtime.mesh
        if self.virtual_ranks is None:
            # Each rank holds its own row of what it has accumulated, and of what compression left out.
            accumulated, residual = _jax.shard_rows((state.accumulated, state.residual), mesh)
        else:
            accumulated, residual = self._replicate(state.accumulated), None
        opt_state = state.opt_state
        if self.reduction.shard_optimizer_state:
            opt_state = _jax.place(opt_state, sharded_update.shardings(opt_state, mesh))
        else:
            opt_state = self._replicate(opt_state)
        shared = self._replicate(replace(state, opt_state=None, accumulated=None, residual=None))
        self.state = replace(shared, opt_state=opt_state, accumulated=accumulated, residual=residual)

    def whole_state(self, *, alone: bool = False) -> TrainState:
        """Returns the state with what ranks keep in parts whole on every rank; all processes must call it, or `alone` be True.

        Raises:
            RuntimeError: If one process alone asks for what lies in parts on several.
        """
        state = self._built()
        if alone and not all(x.is_fully_addressable or x.is_fully_replicated for x in jax.tree.leaves(state.opt_state)):
            raise RuntimeError(
                "With shard_optimizer_state each process holds a part of the optimizer's state, so that one alone cannot save it. "
                "Save on every process: leave OnMaster out."
            )
        return replace(state, opt_state=jax.tree.map(lambda x: x if x.is_fully_replicated else self._gather(x), state.opt_state))

    def variables(self) -> Variables:
        """Returns host copies of parameters and model state."""
        state = self._built()
        return Variables(jax.tree.map(np.array, state.params), jax.tree.map(np.array, state.model_state))

    def train_epoch(self, batches: Iterable[Placed], hooks: Hooks, *, first_index: int = 0, sums: Any = None) -> Any:
        """Trains on placed batches; returns the sums of the epoch, or None if there was no batch.

        Args:
            batches: Placed batches.
            hooks: What runs between the steps.
            first_index: Number of the first step in the epoch.
            sums: Sums of the steps before.
        """
        assert self._train_step is not None, "compile() comes first."
        running: deque[Any] = deque()
        index = first_index
        for placed in batches:
            hooks.on_batch_begin(index)
            sums = self._zero_sums(placed) if sums is None else sums
            step = self._program(placed, sums)
            # Read here, because a callback may have replaced the state.
            self.state, sums = step(self._built(), sums, placed.batch)
            _wait_for_older(running, sums["loss"][1])
            index += placed.num_steps
            if hooks.on_batch_end(index - 1, sums, placed.num_rows):
                break
        return sums

    def evaluate(self, batches: Iterable[Placed], hooks: Hooks) -> Any:
        """Evaluates placed batches; returns their sums, or None if there was no batch."""
        assert self._eval_step is not None, "compile() comes first."
        state, running, sums = self._built(), deque(), None
        index = 0
        for placed in batches:
            hooks.on_batch_begin(index)
            sums = self._zero_sums(placed) if sums is None else sums
            step = self._eval_step if placed.num_steps == 1 else self._eval_steps
            assert step is not None
            sums = step(state.params, state.model_state, sums, placed.batch)
            _wait_for_older(running, sums["loss"][1])
            index += placed.num_steps
            hooks.on_batch_end(index - 1, sums, placed.num_rows)
        return sums

    def predict(self, batches: Iterable[Placed], hooks: Hooks) -> Any:
        """Returns the outputs of all batches, real rows in order, as host arrays `[examples, ...]` on every process."""
        state = self._built()
        parts: list[Any] = []
        index = 0
        for placed in batches:
            hooks.on_batch_begin(index)
            if placed.num_steps == 1:
                outputs = self._predict_step(state.params, state.model_state, placed.batch.inputs)
                parts.append(jax.tree.map(lambda x, n=placed.num_rows: self._fetch(x)[:n], outputs))
            else:
                outputs = self._predict_steps(state.params, state.model_state, placed.batch.inputs)
                parts += _rows_of_steps(jax.tree.map(self._fetch, outputs), placed)
            index += placed.num_steps
            hooks.on_batch_end(index - 1, None, placed.num_rows)
        if not parts:
            raise ValueError("The dataset is empty: at least one example is needed.")
        return jax.tree.map(lambda *pieces: np.concatenate(pieces), *parts)

    def steps_per_program(self, wanted: int, batch: Batch) -> int:
        """Returns how many steps of evaluation or prediction share a program: as many as wanted, but 1 where that is slow.

        Args:
            wanted: Steps that the user wants in one program.
            batch: This process's rows of a batch.
        """
        if wanted == 1 or self.virtual_ranks is not None or self.runtime.platform != "cpu":
            return wanted
        state = self._built()
        # As in training: XLA's CPU convolutions are many times slower in a program of several steps.
        return 1 if _jax.convolves(self._predict_step, state.params, state.model_state, self._place(batch.inputs)) else wanted

    def output_shapes(self, batch: Batch) -> Any:
        """Returns shapes and dtypes of the model's outputs for a batch of this process's rows."""
        state = self._built()
        fast = make_predict_step(self.adapter.apply, self.runtime.mesh)
        return jax.eval_shape(fast, state.params, state.model_state, self._place(batch.inputs))

    def local_outputs(self, batch: Batch) -> Any:
        """Returns the model's outputs for this process's rows of a batch, padding included, as host arrays."""
        state = self._built()
        outputs = self._predict_step(state.params, state.model_state, self._place(batch.inputs))
        return jax.tree.map(lambda x: np.concatenate([np.asarray(s.data) for s in _in_row_order(x)]), outputs)

    def feed(
        self, items: Iterator[HostBatch], unpack: Callable[[HostBatch], Batch], *, threaded: bool, num_steps: int = 1
    ) -> Feed:
        """Returns a feed of placed batches.

        Args:
            items: Host batches.
            unpack: From a host batch to what a step takes.
            threaded: Whether a thread prepares batches ahead.
            num_steps: Batches of equal shapes that are placed together, for one program; with virtual ranks always 1.
        """
        # Without a thread that hides its cost, device_put takes longer than the compiled step does to fetch host arrays itself.
        is_direct = not threaded and jax.process_count() == 1 and self.virtual_ranks is None

        def place(group: list[HostBatch]) -> Placed:
            batches = [unpack(item) for item in group]
            batch = batches[0] if len(group) == 1 else stack(batches)
            put = self._place if len(group) == 1 else self._place_stacked
            return Placed(batch if is_direct else put(batch), sum(item.num_rows for item in group), len(group))

        return Feed(in_groups(items, num_steps if self.virtual_ranks is None else 1), place, threaded=threaded)

    def _program(self, placed: Placed, sums: Any) -> Callable:
        """Returns what runs the steps of a placed batch."""
        assert self._train_step is not None
        if placed.num_steps == 1:
            return self._train_step
        if self._train_steps is None:
            assert self._make_train_steps is not None
            steps = self._make_train_steps()
            if self.runtime.platform == "cpu" and _jax.convolves(steps, self._built(), sums, placed.batch):
                logger.info("Steps run one by one: XLA's CPU convolutions are many times slower in a program of several steps.")
                steps = one_by_one(self._train_step)
            self._train_steps = steps
        return self._train_steps

    def lower_train_step(self, batch: Batch) -> Any:
        """Returns the lowered program of a training step for host batches like `batch`; with virtual ranks several `Programs`."""
        assert self._train_step is not None, "compile() comes first."
        placed = Placed(self._place(batch), 0)
        return self._train_step.lower(self._built(), self._zero_sums(placed), placed.batch)  # pyright: ignore[reportFunctionMemberAccess]

    def _built(self) -> TrainState:
        assert self.state is not None, "build() comes first."
        return self.state

    def _replicate(self, tree: Any) -> Any:
        return _jax.replicate(tree, self.runtime.mesh)

    def _fetch(self, x: jax.Array) -> np.ndarray:
        """Returns a whole array that is sharded by row, on every process."""
        return np.asarray(x if x.is_fully_addressable else self._gather(x))

    def _create_state(self, variables: Variables) -> None:
        num_ranks = self.runtime.num_ranks if self.virtual_ranks is None else 1
        ranks = num_ranks if self._accumulation_steps > 1 else 0
        optimizer = self._optimizer or optax.identity()
        compressing = self.runtime.num_ranks if self.reduction.keeps_residual else 0
        state = create_state(*variables, optimizer, seed=self._seed, accumulating_ranks=ranks, compressing_ranks=compressing)
        self.set_state(state)

    def _zero_sums(self, placed: Placed) -> Any:
        assert self._parts is not None
        leaves, structure = jax.tree.flatten(placed.batch)
        shapes = [x.shape if placed.num_steps == 1 else x.shape[1:] for x in leaves]
        signature = tuple((shape, jax.dtypes.canonicalize_dtype(x.dtype)) for shape, x in zip(shapes, leaves, strict=True))
        if signature not in self._zeros:
            batch = structure.unflatten([jax.ShapeDtypeStruct(*pair) for pair in signature])
            self._zeros[signature] = self._replicate(zero_sums(self._parts, self._built(), batch, self.runtime.mesh))
        return self._zeros[signature]


def _wait_for_older(running: deque, newest: jax.Array) -> None:
    running.append(newest)
    if len(running) > _IN_FLIGHT:
        jax.block_until_ready(running.popleft())


def _rows_of_steps(outputs: Any, placed: Placed) -> list[Any]:
    """Returns the real rows of each step of host outputs `[steps, rows, ...]`; the steps have equally many."""
    rows = placed.num_rows // placed.num_steps
    return [jax.tree.map(lambda x, step=step: x[step, :rows], outputs) for step in range(placed.num_steps)]


def _in_row_order(x: jax.Array) -> list[Any]:
    return sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
