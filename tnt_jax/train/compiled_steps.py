"""The programs of a trainer: steps of training and evaluation, and what they add to."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import optax

from tnt_jax import _jax
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.train import execution
from tnt_jax.train.contracts import Parts, Steps
from tnt_jax.train.execution import DeviceBatches
from tnt_jax.train.finite import OnNaN
from tnt_jax.train.health.number_watch import NumberWatch
from tnt_jax.train.state import TrainState
from tnt_jax.train.steps.epoch_sums import zero_sums


class CompiledSteps:
    """Steps for one choice of parts and optimizer; each is compiled when it is first called.

    A state that is only traced may be a description. `watch` looks for numbers that are not finite;
    it is None to look for none.
    """

    def __init__(
        self,
        runtime: Runtime,
        steps: Steps,
        parts: Parts,
        optimizer: optax.GradientTransformation,
        *,
        accumulation_steps: int,
        on_nan: OnNaN | None,
    ) -> None:
        self.parts = parts
        self.watch = NumberWatch(on_nan, parts, steps.mesh) if on_nan else None
        self._platform, self._mesh = runtime.platform, steps.mesh
        options: Any = {"accumulation_steps": accumulation_steps, "on_nan": on_nan}
        self._train_step = steps.train(parts, optimizer, **options)
        self._steps = steps
        # Several steps as one program, made when the first such batch comes.
        self._make_train_steps: Callable[[], Callable] | None = None
        self._train_steps: Callable | None = None
        if (fused := steps.fused) is not None:
            self._make_train_steps = partial(fused.train, parts, optimizer, **options)
        self.renew_evaluation()
        self._zeros: dict[Any, Any] = {}

    def renew_evaluation(self) -> None:
        """Traces and compiles evaluation anew when it is called next."""
        fused = self._steps.fused
        self._eval_step = self._steps.evaluate(self.parts)
        self._eval_steps = None if fused is None else fused.evaluate(self._eval_step)

    def training(self, group: DeviceBatches, state: TrainState, sums: Any) -> Callable:
        """Returns what runs the steps of a group of batches: `(state, sums, batch) -> ...`."""
        if group.num_steps == 1:
            return self._train_step
        if self._train_steps is None:
            assert self._make_train_steps is not None
            self._train_steps = execution.fused_unless_slow(
                self._make_train_steps(),
                self._train_step,
                state,
                sums,
                group.batch,
                platform=self._platform,
            )
        return self._train_steps

    def evaluation(self, group: DeviceBatches) -> Callable:
        """Returns what evaluates a group: `(params, model_state, sums, batch) -> sums`."""
        step = self._eval_step if group.num_steps == 1 else self._eval_steps
        assert step is not None
        return step

    def staged(
        self, stage: Literal["trace", "lower"], group: DeviceBatches, state: TrainState
    ) -> Any:
        """Returns a stage of a group's program, or `Programs`; None if steps run one by one."""
        sums = self.zero_sums(group, state)
        sums = sums if self.watch is None else self.watch.with_counts(sums)
        make = getattr(self.training(group, state, sums), stage, None)
        return None if make is None else make(state, sums, group.batch)

    def trace_evaluation(self, group: DeviceBatches, state: TrainState) -> Any:
        """Returns the traced program that evaluates a group of batches; None if it is not one."""
        trace, sums = getattr(self.evaluation(group), "trace", None), self.zero_sums(group, state)
        return None if trace is None else trace(state.params, state.model_state, sums, group.batch)

    def zero_sums(self, group: DeviceBatches, state: TrainState) -> Any:
        """Returns the sums of an epoch before its first batch, on the devices."""
        batch = execution.described_batch(group)
        signature = tuple(jax.tree.leaves(batch))
        mesh = self._mesh
        if signature not in self._zeros:
            zeros = zero_sums(self.parts, state, batch, mesh)
            self._zeros[signature] = _jax.replicate(zeros, mesh)
        return self._zeros[signature]

    def host_sums(
        self, leaves: Sequence[np.ndarray], group: DeviceBatches, state: TrainState
    ) -> Any:
        """Returns sums of an epoch of batches like a group's, with given leaves of host arrays."""
        sums = self.zero_sums(group, state)
        first = len(leaves) - len(jax.tree.leaves(sums))  # 1 if `on_nan` was set, else 0.
        sums = jax.tree.structure(sums).unflatten(leaves[first:])
        sums = _jax.replicate(sums, self._mesh)
        return self.watch.restored(sums, leaves[0]) if first and self.watch else sums
