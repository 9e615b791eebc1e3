"""Training, evaluation and prediction on single batches, for custom loops on a `Model`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from tnt_jax.data.arguments import is_arrays
from tnt_jax.data.sources import HostBatch
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.liveness.rendezvous import check_not_alone
from tnt_jax.keras_compat.fit.data_intake import DataArguments, Unpack, class_weighting, to_batch
from tnt_jax.keras_compat.fit.evaluation import as_returned
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.train.contracts import CountedRows
from tnt_jax.train.trainer import device_feed


class SingleBatches:
    """The methods of a `Model` for single batches.

    Every process of the job must call them with the same global batch, whose rows are distributed
    as in `fit`: the numbers are those of one device. A batch of a new shape is compiled anew.
    """

    _core: Core
    _shared: Shared

    @phases.calling("Model.train_on_batch")
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> float | list[float] | dict[str, float]:
        """Runs one training step, and writes the variables back as `fit` does when it ends.

        Inputs, an array or a list or dict of them, and targets are `[rows, ...]`, weights `[rows]`;
        `class_weight` is multiplied into these. The result is loss and metrics of this batch, as of
        `evaluate`.

        Raises:
            RuntimeError: If the model is a view.
            ValueError: If data and arguments contradict one another.
        """
        self._core.require_trainable()
        if self._core.options.sync is not None:
            raise ValueError(
                "train_on_batch is not possible with sync=LocalSteps, as nobody knows which call "
                "is the last of a round. Use fit, or tnt_jax.local_steps in a custom training loop."
            )
        unpack = partial(to_batch, weighting=class_weighting(class_weight))
        first = self._single(x, y, sample_weight)
        batch = unpack(first)
        self._shared.prepare(batch)
        self._core.choose_mesh(batch)
        self._shared.check_rows(batch, train=True)
        with self._fed(first, unpack) as feed:
            sums = self._core.trainer.train_epoch(feed, CountedRows())
        self._shared.progress.epoch_sums = sums
        self._core.write_back_outside_fit()
        return self._results(return_dict)

    @phases.calling("Model.test_on_batch")
    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> float | list[float] | dict[str, float]:
        """Evaluates one batch; arguments, result and errors are those of `train_on_batch`."""
        self._core.require_compiled()
        first = self._single(x, y, sample_weight)
        self._shared.prepare(to_batch(first))
        self._shared.check_rows(to_batch(first), train=False)
        with self._fed(first) as feed:
            self._shared.progress.epoch_sums = self._core.trainer.evaluate(feed, CountedRows())
        return self._results(return_dict)

    @phases.calling("Model.predict_on_batch")
    def predict_on_batch(self, x: Any) -> Any:
        """Returns all outputs `[rows, ...]` for one batch as NumPy arrays, on every process."""
        first = self._single(x, None, None, is_inputs=True)
        self._shared.build_for(to_batch(first))
        self._shared.check_outputs(to_batch(first))
        with self._fed(first) as feed:
            return self._core.trainer.predict(feed, CountedRows())

    def __call__(self, inputs: Any, training: bool | None = False) -> Any:
        """Returns all outputs `[rows, ...]` for one batch as JAX arrays, on every process.

        Raises:
            TypeError: If the inputs are traced, as in a function under `jax.jit` or `jax.grad`.
            ValueError: If `training` is True.
        """
        if training:
            raise ValueError(
                "model(inputs, training=True) is not possible: it would change the model's state "
                "as a side effect. Use train_on_batch, or module.apply of the wrapped module."
            )
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
            raise TypeError(
                "model(inputs) distributes its rows by itself and cannot be traced: call the "
                "wrapped module in a function under jax.jit or jax.grad, or pass "
                "compile(objective=...)."
            )
        return jax.tree.map(jnp.asarray, self.predict_on_batch(inputs))

    def reset_metrics(self) -> None:
        """Clears the result of `get_metrics_result`, as do training and evaluation."""
        self._shared.progress.epoch_sums = None

    def get_metrics_result(self) -> dict[str, float]:
        """Returns loss and metrics of the last epoch, evaluation or batch since `compile`."""
        sums = self._shared.progress.epoch_sums
        return {} if sums is None or self._core.functions is None else self._core.logs(sums)

    def _single(self, x: Any, y: Any, sample_weight: Any, *, is_inputs: bool = False) -> HostBatch:
        """Returns this process's rows of one global batch."""
        check_not_alone("A call for a single batch")
        data = DataArguments(x, y, sample_weight, is_inputs=is_inputs)
        num_rows = self._shared.source(data).num_examples if is_arrays(x) else None
        if num_rows is None:
            raise ValueError(
                "A single batch must be an array, or a list or dict of arrays, but x is a "
                f"{type(x).__name__}."
            )
        # A batch with fewer rows than ranks is padded like a last batch.
        size = max(num_rows, self._core.trainer.rank_slice.num_ranks)
        return next(iter(self._shared.source(replace(data, batch_size=size)).batches(0)))

    @contextmanager
    def _fed(self, first: HostBatch, unpack: Unpack = to_batch) -> Iterator[Any]:
        """Yields the batch on the devices, for a step within the block."""
        with (
            phases.in_phase("step"),
            device_feed(self._core.trainer, iter([first]), unpack, threaded=False) as feed,
        ):
            yield feed

    def _results(self, return_dict: bool) -> float | list[float] | dict[str, float]:
        with phases.in_phase("step"):
            return as_returned(self._core.logs(self._shared.progress.epoch_sums), return_dict)
