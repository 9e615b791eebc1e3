"""The programs of a trainer: steps of training and evaluation, and what they add to.

A thread can compile a program while the host does what else precedes its first call:

    trainer.ahead.start(lambda: trainer.lower(group))
    ...  # The rows are checked, validation data is opened, callbacks begin, a batch is read.
    trainer.ahead.wait()

They are the step of training and, beside the first steps, the evaluation of validation data. The
compiler alone runs in the thread. JAX keeps what it compiled for a program that was lowered, so
that the function of `jax.jit` finds it when it is called; what does not fit, such as a first batch
of another shape, is compiled by the call itself.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.distributed import timeline
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.shared_sums.joining import TARGET
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.train.contracts import Steps, TrainingStep
from tnt_jax.train.execution import DeviceBatches, described_batch
from tnt_jax.train.health.number_watch import NumberWatch
from tnt_jax.train.state import TrainState
from tnt_jax.train.steps.epoch_sums import zero_sums
from tnt_jax.train.steps.step import compiled


@dataclass(frozen=True)
class Kept:
    """What an elastic job traces once, as devices are opened anew for each generation."""

    # Steps by the number of ranks, and by their operands in words.
    programs: dict[tuple[int, str], bytes] = field(default_factory=dict)
    # Sums of an epoch before its first batch, on the host, by the batch's description.
    zeros: dict[Any, Any] = field(default_factory=dict)
    # How often steps have run, by the number of ranks, of steps, and of their rows.
    runs: Counter[tuple[int, int, int]] = field(default_factory=Counter)


class KeptStep:
    """A jitted step `(state, sums, batch) -> (state, sums)` that is traced once in an elastic job.

    Where processes are lost or join, devices are opened anew, and what was traced and compiled for
    those before is gone. What was traced is kept for each number of ranks. Its program is in the
    compilation cache: XLA cannot write a program in bytes that it has read from bytes.
    """

    def __init__(self, step: Any, kept: Kept, mesh: Mesh) -> None:
        self._step, self._kept, self._mesh = step, kept.programs, mesh
        self._opened: dict[Any, Any] = {}

    def __call__(self, *operands: Any) -> Any:
        """Runs the step."""
        return self._of(operands)(*operands)

    def lower(self, *operands: Any) -> Any:
        """Returns the lowered program."""
        return self._of(operands).lower(*operands)

    def trace(self, *operands: Any) -> Any:
        """Returns the traced step."""
        return self._step.trace(*operands)

    def _of(self, operands: tuple[Any, ...]) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        # A process that is alone passes rows of the host, whose numbers may have 64 bits.
        kind = tree, tuple((x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
        if kind not in self._opened:
            try:
                self._opened[kind] = self._open(operands, (self._mesh.size, str(kind)))
            except Exception as error:  # If it is of the step, the call raises it again.
                logger.debug("A step is traced for each generation: %s", error)
                self._opened[kind] = self._step
        return self._opened[kind]

    def _open(self, operands: tuple[Any, ...], key: tuple[int, str]) -> Any:
        """Returns a jitted function of what is kept, or of the step, which is traced and kept."""
        # With a state in parts, training does not go on in place.
        if not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(operands[0])):
            return self._step
        if key not in self._kept:
            checks = [export.DisabledSafetyCheck.custom_call(TARGET)]
            traced = export.export(self._step, disabled_checks=checks)(*operands)
            # Without the types of the trees, which bytes cannot tell.
            plain = replace(
                traced,
                in_tree=jax.tree.structure(((0,) * traced.in_tree.num_leaves, {})),
                out_tree=jax.tree.structure((0,) * traced.out_tree.num_leaves),
            )
            self._kept[key] = bytes(plain.serialize())
        program = export.deserialize(bytearray(self._kept[key]))
        structure = jax.tree.structure(operands[:2])

        def step(*operands: Any) -> Any:
            return structure.unflatten(program.call(*jax.tree.leaves(operands)))

        shardings = jax.tree.map(lambda x: x.sharding, operands[:2])
        return compiled(step, self._mesh, out_shardings=shardings)


class CompiledSteps:
    """Steps for one choice of parts and optimizer; each is compiled when it is first called.

    A state that is only traced may be a description; `watch` looks for what is not finite.
    """

    def __init__(self, steps: Steps, step: TrainingStep, *, kept: Kept | None = None) -> None:
        self.step, self.parts = step, step.parts
        self.watch = NumberWatch(step.on_nan, step.parts, steps.mesh) if step.on_nan else None
        self._mesh = steps.mesh
        self._kept = kept
        self._train_step = self._lasting(steps.train(step))
        self._steps = steps
        # Several steps as one program, made when the first such batch comes.
        self._train_steps: Callable | None = None
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
            fused = self._steps.fused
            assert fused is not None
            self._train_steps = self._lasting(fused.train(self.step))
        return self._train_steps

    def _lasting(self, step: Callable) -> Callable:
        if self._kept is None or not isinstance(step, jax.stages.Wrapped):
            return step
        return KeptStep(step, self._kept, self._mesh)

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
        batch = described_batch(group)
        kind = tuple(jax.tree.leaves(batch))
        if kind not in self._zeros:
            kept = {} if self._kept is None else self._kept.zeros
            if kind not in kept:
                kept[kind] = zero_sums(self.parts, state, batch, self._mesh)
            self._zeros[kind] = _jax.replicate(kept[kind], self._mesh)
        return self._zeros[kind]

    def host_sums(
        self, leaves: Sequence[np.ndarray], group: DeviceBatches, state: TrainState
    ) -> Any:
        """Returns sums of an epoch of batches like a group's, with given leaves of host arrays."""
        sums = self.zero_sums(group, state)
        first = len(leaves) - len(jax.tree.leaves(sums))  # 1 if `on_nan` was set, else 0.
        sums = jax.tree.structure(sums).unflatten(leaves[first:])
        sums = _jax.replicate(sums, self._mesh)
        return self.watch.restored(sums, leaves[0]) if first and self.watch else sums


# One thread: a program that is compiled again waits for the first time, and is then known. The
# interpreter waits for it at its end, because the compiler cannot be interrupted.
_thread = Slot(
    lambda: ThreadPoolExecutor(1, thread_name_prefix="tnt_jax-compile"),
    close=ThreadPoolExecutor.shutdown,
)


class Ahead:
    """The program that is compiled ahead of the step that runs it."""

    def __init__(self) -> None:
        self._running: Future[Any] | None = None

    def start(self, lower: Callable[[], Any]) -> None:
        """Begins to compile what `lower` returns, if it is of one `jax.jit`; all must call it.

        Errors are raised by the step, after the checks that may explain them.
        """
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return
        try:
            lowered = lower()
        except Exception as error:
            logger.debug("The step cannot be compiled ahead: %s", error)
            return
        if isinstance(lowered, jax.stages.Lowered):
            self._running = _thread.get().submit(_compile, lowered)

    def wait(self) -> None:
        """Waits until the program is compiled, if one was started."""
        if self._running is None:
            return
        with phases.in_phase("compile", spent="compiling"):
            error = self._running.exception()
        # After a signal has ended the wait, the step of another `fit` waits again.
        self._running = None
        if error is not None:
            logger.debug("The step was not compiled ahead: %s", error)


def _compile(lowered: jax.stages.Lowered) -> None:
    with timeline.span("compile the step ahead", "compile"):
        lowered.compile()
