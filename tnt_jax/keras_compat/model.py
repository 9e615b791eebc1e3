"""`Model`: a Flax or Keras model with Keras's compile, fit, evaluate and predict on every device of the job."""

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import jax
import numpy as np

from tnt_jax import runtime
from tnt_jax.adapters import adapter_for
from tnt_jax.adapters.base import Variables
from tnt_jax.collectives import DEFAULT_BUCKET_BYTES, raise_together
from tnt_jax.data.dispatch import Reading, as_source, is_arrays, unpack
from tnt_jax.data.feed import place_of
from tnt_jax.data.layout import micro_batch_size, num_padded_rows
from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.data.stream import EpochStream
from tnt_jax.keras_compat import optimizers
from tnt_jax.keras_compat.callbacks import CallbackList, History
from tnt_jax.keras_compat.compiled import CompileArguments, Compiled
from tnt_jax.keras_compat.hooks import PhaseHooks, complete
from tnt_jax.keras_compat.inputs import Weighting, class_weighting, split_validation, to_batch
from tnt_jax.keras_compat.summary import summary_table
from tnt_jax.log import logger
from tnt_jax.loop import Trainer
from tnt_jax.step import Batch


class Model:
    """A model that trains on every device of the job, with the numbers of one.

    Args:
        module: A Flax Linen module, a Flax NNX module, or a Keras 3 model on the JAX backend. The last two hold their variables:
            training starts from them, and every `fit` ends by writing the results back into them.
        seed: Seed of a Linen module's fresh variables (`module.init(jax.random.key(seed), ...)`), of dropout, and of the order of
            shuffled arrays.
        variables: Variables of a Linen module to start from, as `module.init` returns them; fresh ones by default, made when data
            is first seen.

    Attributes:
        history: The `History` of the last `fit`.
        stop_training: Set it to True in a callback to end training after the current step.
        rows_in_batch: Real rows of the global batch in the current step.

    Raises:
        TypeError: If `module` is of no known kind.
        ValueError: If `variables` come with a module that holds its own, or a Keras model computes on another backend than JAX.
    """

    def __init__(self, module: Any, *, seed: int = 0, variables: Mapping[str, Any] | None = None) -> None:
        self.module = module
        self.history: History | None = None
        self.stop_training = False
        self.rows_in_batch = 0
        self._seed = seed
        self._adapter = adapter_for(module, variables=variables)
        self._lazy_trainer: Trainer | None = None
        self._arguments: CompileArguments | None = None
        self._optimizer: Any = None
        self._compiled: Compiled | None = None

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
    ) -> None:
        """Chooses optimizer, loss and metrics, and starts the optimizer afresh; weights stay.

        Args:
            optimizer: A name, a `tnt_jax.optimizers` object or an Optax transformation.
            loss: A name, a `tnt_jax.losses` object, or a callable `f(targets, outputs) -> [batch, ...]`; for several outputs a list
                in order or a dict by name.
            loss_weights: Factor of each output's loss.
            metrics: Names or `tnt_jax.metrics` objects that ignore sample weights; for several outputs a list of lists or a dict.
            weighted_metrics: The same, using sample weights.

        Raises:
            ValueError: If a name is unknown (the message lists the known ones) or the loss is missing.
        """
        if loss is None:
            raise ValueError(
                "compile() needs a loss, for instance loss='sparse_categorical_crossentropy' or a tnt_jax.losses object."
            )
        self._optimizer = optimizers.get(optimizer)
        self._arguments = CompileArguments(loss, loss_weights, metrics, weighted_metrics)
        self._arguments.check_names()
        self._compiled = None

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
        *,
        tnt_micro_batch_size: int | None = None,
        tnt_validation_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
        tnt_distribute_validation_dataset: bool = True,
    ) -> History:
        """Trains for `epochs - initial_epoch` epochs and returns their history, the same on every process.

        Args:
            x: Arrays `[examples, ...]` (or a dict, tuple or list of them), a `tf.data.Dataset` or an iterable of batches
                `(inputs, targets[, weights])`.
            y: Targets `[examples, ...]`, with arrays only.
            batch_size: Rows of a global batch over all ranks, with arrays only; 32 by default.
            epochs: Number of the last epoch.
            verbose: 0 silent, 1 a bar, 2 one line per epoch; `"auto"` is 1. Only the master prints.
            callbacks: `tnt_jax.callbacks.Callback` objects.
            validation_split: Part of the arrays, from their end, that validates instead of training.
            validation_data: `(x, y)`, `(x, y, weights)` or a dataset, evaluated after epochs.
            shuffle: Whether arrays get a new order every epoch; it follows from the model's seed and the epoch.
            class_weight: Weight of each class index, multiplied into the sample weights.
            sample_weight: Weights `[examples]`, with arrays only.
            initial_epoch: Number of epochs that are done already.
            steps_per_epoch: Steps of an epoch; passes over the data then follow one another.
            validation_steps: Batches of an evaluation; all by default.
            validation_batch_size: Global batch of validation arrays; `batch_size` by default.
            validation_freq: Validate every so many epochs, or after the epochs listed (from 1).
            tnt_micro_batch_size: Rows of one rank: the global batch is this times the ranks.
            tnt_validation_micro_batch_size: The same for validation.
            tnt_distribute_dataset: False if each process brings its own shard, batched for its own ranks.
            tnt_distribute_validation_dataset: The same for validation.

        Raises:
            RuntimeError: If the model was not compiled.
            ValueError: If data and arguments contradict one another.
        """
        self._require_compiled()
        if validation_split:
            (x, y, sample_weight), validation_data = split_validation(x, y, sample_weight, validation_split)
        source = self._source(
            x, y, sample_weight, batch_size, tnt_micro_batch_size, shuffle=shuffle, distribute=tnt_distribute_dataset
        )
        weighting = class_weighting(class_weight)
        stream = EpochStream(source, steps_per_epoch=steps_per_epoch)
        self._prepare(stream.peek(initial_epoch), weighting)
        self._log_plan(stream)
        if validation_batch_size is None and tnt_validation_micro_batch_size is None and is_arrays(unpack(validation_data)[0]):
            validation_batch_size = source.global_batch_size
        validation = self._validation_source(
            validation_data, validation_batch_size, tnt_validation_micro_batch_size, distribute=tnt_distribute_validation_dataset
        )
        params = {"epochs": epochs, "steps": stream.num_steps, "verbose": verbose}
        hooks = CallbackList(complete(callbacks, verbose=verbose, in_training=True), model=self, params=params)
        self.stop_training = False
        hooks.call("on_train_begin", {})
        logs: dict[str, float] = {}
        for epoch in range(initial_epoch, epochs):
            hooks.call("on_epoch_begin", epoch, {})
            logs = self._train_epoch(stream, epoch, hooks, weighting)
            if validation is not None and _is_due(epoch + 1, validation_freq):
                logs |= {f"val_{name}": value for name, value in self._evaluate(validation, validation_steps, hooks).items()}
            hooks.call("on_epoch_end", epoch, logs)
            if self.stop_training:
                break
        hooks.call("on_train_end", logs)
        self.write_back()
        assert self.history is not None
        return self.history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        tnt_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
    ) -> float | list[float] | dict[str, float]:
        """Returns loss and metrics over the data, each example once, the same on every process.

        Args:
            x: Data as in `fit`.
            y: Targets, with arrays only.
            batch_size: Global batch, with arrays only; 32 by default.
            verbose: As in `fit`.
            sample_weight: Weights `[examples]`, with arrays only.
            steps: Batches to evaluate; all by default.
            callbacks: As in `fit`.
            return_dict: Whether to return a dict by name instead of a list in the order of `metrics_names`.
            tnt_micro_batch_size: As in `fit`.
            tnt_distribute_dataset: As in `fit`.

        Returns:
            The loss alone if there are no metrics, else a list, or a dict with `return_dict`.

        Raises:
            RuntimeError: If the model was not compiled.
            ValueError: If data and arguments contradict one another.
        """
        self._require_compiled()
        source = self._source(x, y, sample_weight, batch_size, tnt_micro_batch_size, distribute=tnt_distribute_dataset)
        params = {"steps": steps or source.num_batches, "verbose": verbose}
        hooks = CallbackList(complete(callbacks, verbose=verbose, in_training=False), model=self, params=params)
        logs = self._evaluate(source, steps, hooks)
        values = list(logs.values())
        return logs if return_dict else values[0] if len(values) == 1 else values

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        *,
        tnt_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
    ) -> Any:
        """Returns the model's outputs `[examples, ...]` as NumPy arrays in the order of the data, in full on every process.

        The model need not be compiled. Targets that the data holds are ignored.

        Args:
            x: Data as in `fit`.
            batch_size: Global batch, with arrays only; 32 by default.
            verbose: As in `fit`.
            steps: Batches to predict; all by default.
            callbacks: As in `fit`.
            tnt_micro_batch_size: As in `fit`.
            tnt_distribute_dataset: As in `fit`.
        """
        source = self._source(x, None, None, batch_size, tnt_micro_batch_size, distribute=tnt_distribute_dataset)
        params = {"steps": steps or source.num_batches, "verbose": verbose}
        hooks = CallbackList(complete(callbacks, verbose=verbose, in_training=False), model=self, params=params)
        stream = EpochStream(source)
        self._trainer.build(to_batch(stream.peek(0)).inputs)
        hooks.call("on_predict_begin", {})
        with self._trainer.feed(islice(stream.epoch(0), steps), to_batch, threaded=not source.in_memory) as feed:
            outputs = self._trainer.predict(feed, PhaseHooks("predict", hooks, model=self, read=dict))
        hooks.call("on_predict_end", {})
        return outputs

    def build(self, inputs: Any) -> None:
        """Creates the variables for inputs of a known shape.

        Args:
            inputs: A shape such as `(None, 28, 28, 1)` for one float32 input, or a pytree of sample arrays or
                `jax.ShapeDtypeStruct` with a leading batch dimension.
        """
        is_shape = isinstance(inputs, (tuple, list)) and all(size is None or isinstance(size, int) for size in inputs)
        self._trainer.build(jax.ShapeDtypeStruct((1, *inputs[1:]), np.float32) if is_shape else inputs)

    def summary(self) -> None:
        """Prints a table of all arrays with shapes, counts and bytes, on the master.

        Raises:
            RuntimeError: If the model has no variables yet.
        """
        variables = self._built_variables()
        if runtime.is_master_rank() or runtime.init().settings.output_on_all_devices:
            print(summary_table(self._adapter.name, *variables), flush=True)

    def write_back(self) -> None:
        """Stores the trained variables in the wrapped object, if it holds variables; `fit` does so when it ends.

        A Linen module holds none. Call it in a callback that looks into the NNX module or the Keras model during training.
        """
        if self._adapter.holds_variables and self._trainer.state is not None:
            self._adapter.write_back(self._trainer.variables())

    @property
    def variables(self) -> Any:
        """Copies of the variables in the form of the model's library.

        For Linen a dict ready for `module.apply`, for NNX a state for `nnx.update`, for Keras a list as of `get_weights`.

        Raises:
            RuntimeError: If the model has no variables yet.
        """
        return self._adapter.export(self._built_variables())

    @property
    def metrics_names(self) -> list[str]:
        """Names of the logs in the order in which `evaluate` lists them; empty before data was seen."""
        return [] if self._compiled is None else self._compiled.metrics_names()

    @property
    def _trainer(self) -> Trainer:
        if self._lazy_trainer is None:
            self._lazy_trainer = Trainer(self._adapter, runtime.init(), seed=self._seed)
        return self._lazy_trainer

    def _built_variables(self) -> Variables:
        if self._trainer.state is None:
            raise RuntimeError("The model has no variables yet. Call build(shape_or_sample), or fit, evaluate or predict first.")
        return self._trainer.variables()

    def _require_compiled(self) -> None:
        if self._arguments is None:
            raise RuntimeError("The model must be compiled first: call compile(optimizer=..., loss=...).")

    def _source(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        micro: int | None,
        *,
        shuffle: bool = False,
        distribute: bool = True,
    ) -> Source:
        place = place_of(runtime.init())
        return as_source(x, y, sample_weight, Reading(place, batch_size, micro, shuffle, self._seed, distribute))

    def _validation_source(self, data: Any, batch_size: int | None, micro: int | None, *, distribute: bool) -> Source | None:
        if data is None:
            return None
        x, y, weight = unpack(data)
        return self._source(x, y, weight, batch_size, micro, distribute=distribute)

    def _log_plan(self, stream: EpochStream) -> None:
        """Says once how the data is distributed."""
        source, num_ranks = stream.source, self._trainer.runtime.num_ranks
        size, examples, steps = source.global_batch_size, source.num_examples, stream.num_steps
        logger.info(
            "Global batch %s = %s rows on each of %d rank(s); %s examples, %s steps per epoch; %s padded row(s) per full batch, "
            "%s in the last one; shuffle seed %d.",
            size, None if size is None else micro_batch_size(size, num_ranks), num_ranks, examples or "an unknown number of",
            steps or "an unknown number of", None if size is None else num_padded_rows(size, num_ranks),
            num_padded_rows(examples % size or size, num_ranks) if size and examples else "unknown", self._seed,
        )  # fmt: skip

    def _prepare(self, first: HostBatch, weighting: Weighting | None = None) -> None:
        """Creates variables and compiled functions for data like `first`, and checks it against the losses."""
        trainer = self._trainer
        batch = to_batch(first, weighting)
        trainer.build(batch.inputs)
        if self._compiled is not None:
            return
        assert self._arguments is not None
        compiled = Compiled(self._arguments, trainer.output_shapes(batch), batch.targets)
        raise_together(self._problem_of_first_batch(compiled, batch))
        settings = trainer.runtime.settings
        threshold = DEFAULT_BUCKET_BYTES if settings.fusion_threshold_kb is None else settings.fusion_threshold_kb * 1024
        trainer.compile(compiled.step_parts(self._adapter.apply), self._optimizer.transformation(), threshold=threshold)
        self._compiled = compiled

    def _problem_of_first_batch(self, compiled: Compiled, batch: Batch) -> ValueError | None:
        """Returns what is wrong with this process's rows of the first batch, if anything."""
        rows = int(batch.mask.sum()) if batch.mask is not None else len(jax.tree.leaves(batch.inputs)[0])
        outputs = self._trainer.local_outputs(batch) if compiled.looks_at_outputs else None
        try:
            compiled.check_first_batch(outputs, batch.targets, rows=rows)
        except ValueError as error:
            return error
        return None

    def _train_epoch(self, stream: EpochStream, epoch: int, hooks: CallbackList, weighting: Weighting | None) -> dict[str, float]:
        assert self._compiled is not None
        around = PhaseHooks("train", hooks, model=self, read=self._compiled.results)
        with self._trainer.feed(
            stream.epoch(epoch), lambda item: to_batch(item, weighting), threaded=not stream.source.in_memory
        ) as feed:
            sums = self._trainer.train_epoch(feed, around)
        if sums is None:
            raise ValueError(f"The dataset gave no batch in epoch {epoch + 1}. A generator is read once: pass steps_per_epoch.")
        logs = self._compiled.results(sums)
        if not math.isfinite(logs["loss"]):
            logger.warning(
                "The training loss of epoch %d is %s: inputs or weights hold NaN or infinity.", epoch + 1, logs["loss"]
            )
        return logs

    def _evaluate(self, source: Source, steps: int | None, hooks: CallbackList) -> dict[str, float]:
        stream = EpochStream(source)
        self._prepare(stream.peek(0))
        assert self._compiled is not None
        hooks.call("on_test_begin", {})
        around = PhaseHooks("test", hooks, model=self, read=self._compiled.results)
        batches: Iterator[HostBatch] = islice(stream.epoch(0), steps)
        with self._trainer.feed(batches, to_batch, threaded=not source.in_memory) as feed:
            logs = self._compiled.results(self._trainer.evaluate(feed, around))
        hooks.call("on_test_end", logs)
        return logs


def _is_due(epoch: int, freq: int | list[int]) -> bool:
    """Tells whether epoch number `epoch`, from 1, is followed by validation."""
    return epoch % freq == 0 if isinstance(freq, int) else epoch in freq
