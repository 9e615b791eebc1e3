"""`Model`: a Flax or Keras model with Keras's compile, fit, evaluate and predict on every device of the job."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import jax
import numpy as np

from tnt_jax import runtime
from tnt_jax.adapters import wrap
from tnt_jax.data.dispatch import is_arrays, unpack
from tnt_jax.data.stream import EpochStream
from tnt_jax.keras_compat import optimizers
from tnt_jax.keras_compat.callbacks import CallbackList, History
from tnt_jax.keras_compat.compiled import CompileArguments, Compiled
from tnt_jax.keras_compat.hooks import PhaseHooks, complete
from tnt_jax.keras_compat.inputs import class_weighting, split_validation, to_batch
from tnt_jax.keras_compat.inspection import InspectionMixin
from tnt_jax.keras_compat.objective import CompiledObjective
from tnt_jax.keras_compat.running import Plan, RunningMixin, check_compile_options
from tnt_jax.keras_compat.saving import SavingMixin
from tnt_jax.keras_compat.wrapped import write_back, writing_back
from tnt_jax.loop import Trainer
from tnt_jax.reduction import choose_reduction
from tnt_jax.reproducible import check_reproducible
from tnt_jax.seeding import seed_or_default


class Model(RunningMixin, SavingMixin, InspectionMixin):
    """A model that trains on every device of the job, with the numbers of one.

    Args:
        module: A Flax Linen module, a Flax NNX module, or a Keras 3 model on the JAX backend. The last two hold their variables:
            training starts from them, and every `fit` ends by writing the results back into them. What is changed in them between
            two calls, such as weights loaded from a file or layers unfrozen, counts from the next one on.
        seed: Seed of a Linen module's fresh variables (`module.init(jax.random.key(seed), ...)`), of dropout, and of the order of
            shuffled arrays; by default that of `tnt_jax.set_seed`, or 0.
        variables: Variables of a Linen module to start from, as `module.init` returns them; fresh ones by default, made when data
            is first seen.
        precision: Of a Flax model: `"float32"`; `"mixed_bfloat16"` (bfloat16 arithmetic, float32 weights and updates); or
            `"bfloat16"` (weights, gradients and the optimizer's state, too). A Keras model is built with a dtype policy instead.
        trainable: Paths of the parameters that are trained, such as `["head", "encoder/*/bias"]`; all by default. A path names an
            array or everything below it, and may hold `*`.
        frozen: Paths of parameters that are not trained: they have no gradients and no optimizer state.
        synchronize_batch_norm: Whether the batch normalisation of a Keras model takes its statistics over all ranks. Flax modules
            say so themselves: `BatchNorm(axis_name="data")`.
        fusion_threshold: kB from which a bucket of gradients is full: gradients travel between ranks in buckets, last layers first;
            0 gives each array its own, `"xla"` leaves it to the compiler. By default what `TNT_FUSION_THRESHOLD` says, else what
            was modelled as best on GPUs and measured as best on CPUs (docs/performance.md).
        gradient_compression: `"bfloat16"` sends 16 bits for each 32-bit gradient; what rounding leaves out is sent in later steps.
        ranks_per_host: Neighbouring ranks that are summed before hosts exchange their sums; 1 leaves that to the collective library.
        shard_optimizer_state: Whether each rank keeps and updates its own part of the optimizer's state only, which saves memory.
        reproducible: Whether training, evaluation and prediction give the same bits on every number of devices and processes that
            divides `virtual_ranks`; slower, see docs/reproducibility.md. Steps then run one by one, whatever `steps_per_execution`.
        virtual_ranks: With `reproducible`, the number of chunks of each global batch, a power of two, and the ranks that
            `tnt_micro_batch_size` and batch statistics refer to.

    Attributes:
        history: The `History` of the last `fit`.
        stop_training: Set it to True in a callback to end training after the current step.
        rows_in_batch: Real rows of the global batch in the current step.
        epoch_sums: Sums behind the logs of the epoch so far, on the devices.
        options: The arguments that a saved or cloned model is made with: those of this one without module, variables and
            `ranks_per_host`.

    Raises:
        TypeError: If `module` is of no known kind.
        ValueError: If `variables` come with a module that holds its own, or a Keras model computes on another backend than JAX.
    """

    def __init__(
        self,
        module: Any,
        *,
        seed: int | None = None,
        variables: Mapping[str, Any] | None = None,
        precision: str = "float32",
        trainable: Sequence[str] | None = None,
        frozen: Sequence[str] = (),
        synchronize_batch_norm: bool = False,
        fusion_threshold: int | Literal["xla"] | None = None,
        gradient_compression: Literal["bfloat16"] | None = None,
        ranks_per_host: int = 1,
        shard_optimizer_state: bool = False,
        reproducible: bool = False,
        virtual_ranks: int = 8,
    ) -> None:
        self.module = module
        self.history: History | None = None
        self.stop_training = False
        self.rows_in_batch = 0
        self.epoch_sums: Any = None
        self._seed = seed_or_default(seed)
        self._virtual_ranks = virtual_ranks if reproducible else None
        if reproducible:
            check_reproducible(virtual_ranks, gradient_compression, shard_optimizer_state)
        self._options = {
            "precision": precision, "trainable": trainable, "frozen": frozen, "synchronize_batch_norm": synchronize_batch_norm,
        }  # fmt: skip
        self._reduction_choices = {
            "threshold_kb": fusion_threshold, "compression": gradient_compression, "ranks_per_host": ranks_per_host,
            "shard_optimizer_state": shard_optimizer_state,
        }  # fmt: skip
        # All but ranks_per_host, which belongs to the machine.
        self.options: dict[str, Any] = {
            "seed": self._seed, **self._options, "fusion_threshold": fusion_threshold, "gradient_compression": gradient_compression,
            "shard_optimizer_state": shard_optimizer_state, "reproducible": reproducible, "virtual_ranks": virtual_ranks,
        }  # fmt: skip
        self._adapter = wrap(module, variables=variables, **self._options)
        self._lazy_trainer: Trainer | None = None
        self._arguments: CompileArguments | None = None
        self._optimizer: Any = None
        self._transformation: Any = None
        self._given: dict[str, Any] | None = None
        self._compiled: Compiled | CompiledObjective | None = None
        self._steps_per_execution: int | None = 1
        self._is_fitting = False

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int | Literal["auto"] = 1,
        jit_compile: bool | Literal["auto"] = "auto",
        *,
        objective: Any = None,
    ) -> None:
        """Chooses optimizer, loss and metrics, and starts the optimizer afresh; weights stay.

        Args:
            optimizer: A name, a `tnt_jax.optimizers` object or an Optax transformation.
            loss: A name, a `tnt_jax.losses` object, or a callable `f(targets, outputs) -> [batch, ...]`; for several outputs a list
                in order or a dict by name.
            loss_weights: Factor of each output's loss.
            metrics: Names or `tnt_jax.metrics` objects that ignore sample weights; for several outputs a list of lists or a dict.
            weighted_metrics: The same, using sample weights.
            run_eagerly: Must be False: steps are compiled. `jax.disable_jit()` around `fit` runs them operation by operation.
            steps_per_execution: Steps of training, evaluation or prediction in one compiled program; callbacks see the last step of
                each. `"auto"` times the first steps of training and chooses. Batches of another shape, such as the last one, run by
                themselves.
            jit_compile: Accepted as in Keras; steps are always compiled.
            objective: Takes the place of loss and metrics: a function `f(params, batch, rngs)` that returns one value per row,
                `[rows]` or `[rows, ...]`, or `(values, metrics)` with a dict of values per row. It sees one rank's rows as a
                `tnt_jax.step.Batch`, and `rngs` as `module.apply` takes them, empty in evaluation. If it has an argument `apply`,
                that is the model's forward pass `apply(params, inputs) -> outputs`, which keeps model state such as moving
                averages. Values are weighted by sample weights and averaged over the real rows of all ranks.

        Raises:
            ValueError: If a name is unknown (the message lists the known ones), the loss is missing, or an option is invalid.
        """
        if (loss is None) == (objective is None):
            raise ValueError(
                "compile() needs a loss, for instance loss='sparse_categorical_crossentropy' or a tnt_jax.losses object, "
                "or an objective."
            )
        if objective is not None and (loss_weights, metrics, weighted_metrics) != (None, None, None):
            raise ValueError("An objective returns its own metrics; loss_weights, metrics and weighted_metrics belong to a loss.")
        check_compile_options(run_eagerly, steps_per_execution, jit_compile)
        self._steps_per_execution = None if steps_per_execution == "auto" else steps_per_execution
        self._given = {
            "optimizer": optimizer, "loss": loss, "loss_weights": loss_weights, "metrics": metrics,
            "weighted_metrics": weighted_metrics, "steps_per_execution": steps_per_execution, "objective": objective,
        }  # fmt: skip
        self._optimizer, self._transformation = optimizers.get(optimizer), None
        self._arguments = CompileArguments(loss, loss_weights, metrics, weighted_metrics, objective)
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
        if self._trainer.owner is not None:
            raise RuntimeError("A view cannot be trained: call fit of the model that it was made from.")
        if validation_split:
            (x, y, sample_weight), validation_data = split_validation(x, y, sample_weight, validation_split)
        source = self._source(
            x, y, sample_weight, batch_size, tnt_micro_batch_size, shuffle=shuffle, distribute=tnt_distribute_dataset
        )
        weighting = class_weighting(class_weight)
        stream = EpochStream(source, steps_per_epoch=steps_per_epoch).require_end()
        first = stream.peek(initial_epoch)
        self._prepare(first, weighting)
        self._end_in_trials(first, weighting)
        self._log_plan(stream)
        if validation_batch_size is None and tnt_validation_micro_batch_size is None and is_arrays(unpack(validation_data)[0]):
            validation_batch_size = source.global_batch_size
        validation = self._validation_source(
            validation_data, validation_batch_size, tnt_validation_micro_batch_size, distribute=tnt_distribute_validation_dataset
        )
        params = {"epochs": epochs, "steps": stream.num_steps, "verbose": verbose}
        hooks = CallbackList(complete(callbacks, verbose=verbose, in_training=True), model=self, params=params)
        plan = Plan(stream, first, weighting, initial_epoch, epochs, validation, validation_steps, validation_freq)
        self._is_fitting = True
        try:
            with writing_back(self._trainer):
                self._run_epochs(plan, hooks)
        finally:
            self._is_fitting = False
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
        stream = EpochStream(source).require_end(steps)
        first = to_batch(stream.peek(0))
        self._build_for(first.inputs)
        num_steps = self._trainer.steps_per_program(self._steps_per_execution or 1, first)
        hooks.call("on_predict_begin", {})
        batches = islice(stream.epoch(0), steps)
        with self._trainer.feed(batches, to_batch, threaded=not source.in_memory, num_steps=num_steps) as feed:
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

    def view(self, module: Any) -> "Model":
        """Returns a model that computes with another module and this model's variables, as they are whenever it is called.

        It evaluates (after its own `compile`) and predicts, for instance by decoding token after token what a Transformer was
        trained on in parallel. It cannot be trained.

        Args:
            module: Module of the same library, whose variables are among this model's, at the same paths.
        """
        other = Model(module, seed=self._seed, **self._options)
        other._lazy_trainer = Trainer(
            other._adapter, runtime.init(), seed=self._seed, owner=self._trainer, virtual_ranks=self._virtual_ranks
        )
        return other

    def write_back(self) -> None:
        """Stores the trained variables in the wrapped object, if it holds variables; `fit` does so when it ends or is interrupted.

        A Linen module holds none. Call it in a callback that looks into the NNX module or the Keras model during training.
        """
        write_back(self._trainer)

    @property
    def _trainer(self) -> Trainer:
        if self._lazy_trainer is None:
            place = runtime.init()
            here = (place.platform, place.num_ranks, runtime.get_process_count())
            reduction = choose_reduction(*here, settings=place.settings, **self._reduction_choices)
            self._lazy_trainer = Trainer(
                self._adapter, place, seed=self._seed, reduction=reduction, virtual_ranks=self._virtual_ranks
            )
        return self._lazy_trainer

    def _require_compiled(self) -> None:
        if self._arguments is None:
            raise RuntimeError("The model must be compiled first: call compile(optimizer=..., loss=...).")
