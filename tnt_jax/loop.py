"""The host's side of training: which batch next, which step to start, and what may be read when.

`Trainer` needs no facade: given an adapter, step parts and an optimizer it trains on any iterable of batches.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tnt_jax import _jax, collectives
from tnt_jax.adapters.base import Adapter, Variables
from tnt_jax.data.feed import Feed, make_placer
from tnt_jax.data.sources import HostBatch
from tnt_jax.runtime import Runtime
from tnt_jax.state import TrainState, create_state
from tnt_jax.step import Batch, StepParts, make_eval_step, make_predict_step, make_train_step, zero_sums

# Steps that the host may be ahead of the devices. Each holds a batch, and virtual CPU devices deadlock with too many.
_IN_FLIGHT = 4


class Hooks(Protocol):
    """What the caller of a loop wants to do between steps."""

    def on_batch_begin(self, index: int) -> None:
        """Runs before step `index` of the epoch."""
        ...

    def on_batch_end(self, index: int, sums: Any, num_rows: int) -> bool:
        """Runs after step `index` was started; returns whether to stop. Reading `sums` waits for the step."""
        ...


class Trainer:
    """A model on the devices, with the compiled steps that change and read it.

    Args:
        adapter: Model as pure functions.
        runtime: Mesh to train on.
        seed: Seed of fresh variables and of the random streams of the step.

    Attributes:
        state: Everything that training changes; None before `build`.
    """

    def __init__(self, adapter: Adapter, runtime: Runtime, *, seed: int) -> None:
        self.adapter, self.runtime = adapter, runtime
        self.state: TrainState | None = None
        self._seed = seed
        self._place = make_placer(runtime.mesh)
        self._predict_step = make_predict_step(adapter.apply, runtime.mesh)
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(runtime.mesh, PartitionSpec()))
        self._optimizer: optax.GradientTransformation | None = None
        self._parts: StepParts | None = None
        self._train_step: Callable | None = None
        self._eval_step: Callable | None = None
        self._zeros: dict[Any, Any] = {}

    def build(self, inputs: Any) -> None:
        """Creates the variables, if there are none, for inputs like `inputs`; process 0's values are everybody's."""
        if self.state is None:
            variables = self.adapter.init(inputs, seed=self._seed)
            params, model_state = collectives.broadcast(tuple(variables))
            self.state = self._replicate(create_state(params, model_state, self._optimizer or optax.identity(), seed=self._seed))

    def compile(self, parts: StepParts, optimizer: optax.GradientTransformation, *, threshold: int) -> None:
        """Chooses what the steps compute and starts the optimizer afresh; parameters and model state stay.

        Args:
            parts: Forward pass, loss and metrics.
            optimizer: Optax transformation.
            threshold: Bytes from which a gradient bucket is full.
        """
        self._parts, self._optimizer, self._zeros = parts, optimizer, {}
        self._train_step = make_train_step(parts, optimizer, self.runtime.mesh, threshold=threshold)
        self._eval_step = make_eval_step(parts, self.runtime.mesh)
        if self.state is not None:
            params, model_state = self.variables()
            self.state = self._replicate(create_state(params, model_state, optimizer, seed=self._seed))

    def set_state(self, state: TrainState) -> None:
        """Places a state of host or device arrays on every device."""
        self.state = self._replicate(state)

    def variables(self) -> Variables:
        """Returns host copies of parameters and model state."""
        state = self._built()
        return Variables(jax.tree.map(np.array, state.params), jax.tree.map(np.array, state.model_state))

    def train_epoch(self, batches: Iterable[tuple[Batch, int]], hooks: Hooks) -> Any:
        """Trains on placed batches; returns the sums of the epoch, or None if there was no batch.

        Args:
            batches: Placed batches with their numbers of real rows.
            hooks: What runs between the steps.
        """
        assert self._train_step is not None, "compile() comes first."
        running: deque[Any] = deque()
        sums = None
        for index, (batch, num_rows) in enumerate(batches):
            hooks.on_batch_begin(index)
            sums = self._zero_sums(batch) if sums is None else sums
            # Read here, because a callback may have replaced the state.
            self.state, sums = self._train_step(self._built(), sums, batch)
            _wait_for_older(running, sums["loss"][1])
            if hooks.on_batch_end(index, sums, num_rows):
                break
        return sums

    def evaluate(self, batches: Iterable[tuple[Batch, int]], hooks: Hooks) -> Any:
        """Evaluates placed batches; returns their sums, or None if there was no batch."""
        assert self._eval_step is not None, "compile() comes first."
        state, running, sums = self._built(), deque(), None
        for index, (batch, num_rows) in enumerate(batches):
            hooks.on_batch_begin(index)
            sums = self._zero_sums(batch) if sums is None else sums
            sums = self._eval_step(state.params, state.model_state, sums, batch)
            _wait_for_older(running, sums["loss"][1])
            hooks.on_batch_end(index, sums, num_rows)
        return sums

    def predict(self, batches: Iterable[tuple[Batch, int]], hooks: Hooks) -> Any:
        """Returns the outputs of all batches, real rows in order, as host arrays `[examples, ...]` on every process."""
        state = self._built()
        parts: list[Any] = []
        for index, (batch, num_rows) in enumerate(batches):
            hooks.on_batch_begin(index)
            outputs = self._predict_step(state.params, state.model_state, batch.inputs)
            parts.append(jax.tree.map(lambda x, n=num_rows: self._fetch(x)[:n], outputs))
            hooks.on_batch_end(index, None, num_rows)
        if not parts:
            raise ValueError("The dataset is empty: at least one example is needed.")
        return jax.tree.map(lambda *pieces: np.concatenate(pieces), *parts)

    def output_shapes(self, batch: Batch) -> Any:
        """Returns shapes and dtypes of the model's outputs for a batch of this process's rows."""
        state = self._built()
        return jax.eval_shape(self._predict_step, state.params, state.model_state, self._place(batch.inputs))

    def local_outputs(self, batch: Batch) -> Any:
        """Returns the model's outputs for this process's rows of a batch, padding included, as host arrays."""
        state = self._built()
        outputs = self._predict_step(state.params, state.model_state, self._place(batch.inputs))
        return jax.tree.map(lambda x: np.concatenate([np.asarray(s.data) for s in _in_row_order(x)]), outputs)

    def feed(self, items: Iterator[HostBatch], unpack: Callable[[HostBatch], Batch], *, threaded: bool) -> Feed:
        """Returns a feed of placed batches with their numbers of real rows."""
        return Feed(items, lambda item: (self._place(unpack(item)), item.num_rows), threaded=threaded)

    def _built(self) -> TrainState:
        assert self.state is not None, "build() comes first."
        return self.state

    def _replicate(self, tree: Any) -> Any:
        return _jax.replicate(tree, self.runtime.mesh)

    def _fetch(self, x: jax.Array) -> np.ndarray:
        """Returns a whole array that is sharded by row, on every process."""
        return np.asarray(x if x.is_fully_addressable else self._gather(x))

    def _zero_sums(self, batch: Batch) -> Any:
        assert self._parts is not None
        signature = tuple((x.shape, x.dtype) for x in jax.tree.leaves(batch))
        if signature not in self._zeros:
            zeros = zero_sums(self._parts, self._built(), batch, self.runtime.mesh)
            self._zeros[signature] = self._replicate(zeros)
        return self._zeros[signature]


def _wait_for_older(running: deque, newest: jax.Array) -> None:
    running.append(newest)
    if len(running) > _IN_FLIGHT:
        jax.block_until_ready(running.popleft())


def _in_row_order(x: jax.Array) -> list[Any]:
    return sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
