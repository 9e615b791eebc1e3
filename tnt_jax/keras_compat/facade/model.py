"""`Model`: Keras's compile, fit, evaluate and predict for Flax and Keras models on all devices."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import jax
import numpy as np

from tnt_jax.distributed.liveness.phases import calling
from tnt_jax.keras_compat.callbacks import History
from tnt_jax.keras_compat.compiling.compiled import new_compilation
from tnt_jax.keras_compat.configuration import resolved
from tnt_jax.keras_compat.facade.inspection import Inspection
from tnt_jax.keras_compat.facade.saver import Saving
from tnt_jax.keras_compat.fit.data_intake import DataArguments, FitArguments
from tnt_jax.keras_compat.fit.evaluation import as_returned, evaluate, predict
from tnt_jax.keras_compat.fit.fit_loop import FitLoop
from tnt_jax.keras_compat.fit.hooks import CallbackArguments
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.resume import check_changes, choose_directory, with_backup
from tnt_jax.keras_compat.fit.single_batches import SingleBatches
from tnt_jax.keras_compat.saving.descriptions import Rebuilder, model_from
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.optimizer_view import OptimizerView
from tnt_jax.keras_compat.state.options import ModelOptions
from tnt_jax.seeding import seed_or_default
from tnt_jax.settings import Settings, read_settings
from tnt_jax.sharded import Pipeline, Remat, Rule
from tnt_jax.train.local.groups import LocalSteps
from tnt_jax.train.state import TrainState
from tnt_jax.train.trainer import Trainer


class Model(SingleBatches, Saving, Inspection):
    """A model that trains on every device of the job, with the numbers of one.

    Args:
        module: A Flax Linen module, a Flax NNX module, or a Keras 3 model on the JAX backend. The
            last two hold their variables: training starts from them as they are at each call, and
            every `fit` ends by writing the results back.
        seed: Seed of a Linen module's `init`, of dropout, and of the order of shuffled arrays; by
            default that of `tnt_jax.set_seed`, or 0.
        variables: Variables of a Linen module to start from, as `module.init` returns them.
        precision: Of a Flax model: `"float32"`; `"mixed_bfloat16"` (bfloat16 arithmetic, float32
            weights and updates); or `"bfloat16"` (also weights, gradients and optimizer state). A
            Keras model is built with a dtype policy instead.
        trainable: Paths of the parameters that are trained, such as `["head", "encoder/*/bias"]`;
            all by default. A path names an array or everything below it, and may hold `*`.
        frozen: Paths of parameters that are not trained and have no optimizer state.
        synchronize_batch_norm: Whether the batch normalisation of a Keras model takes its
            statistics over all ranks; Flax modules choose by `BatchNorm(axis_name="data")`.
        fusion_threshold: KiB from which a bucket of gradients is sent; 0 gives each array its own,
            `"xla"` leaves it to the compiler. By default docs/performance.md says what.
        gradient_compression: `"bfloat16"` sends 16 bits for each 32-bit gradient; what rounding
            leaves out is sent in later steps.
        ranks_per_host: Neighbouring ranks that are summed before hosts exchange sums; 1 for none.
        shard_optimizer_state: Whether each rank keeps only its part of the optimizer's state.
        reproducible: Whether results have the same bits on every number of devices and processes
            that divides `virtual_ranks`; slower, one step at a time (docs/reproducibility.md).
        virtual_ranks: With `reproducible`, the number of chunks of each global batch, a power of
            two, and the ranks that `tnt_micro_batch_size` and batch statistics refer to.
        mesh: Devices along `data`, `stage`, `fsdp` and `tensor`, or `"auto"` for the smallest
            sharding that fits the devices (docs/larger_models.md).
        sharding_rules: What is cut over which axis of the mesh.
        pipeline: Equal blocks that are divided over the axis `stage`.
        remat: What blocks keep for backpropagation: `"none"` (all), `"dots"`, `"full"`, or by path.
        sync: `tnt_jax.LocalSteps` to train in groups that exchange updates now and then, for slow
            links. It is another algorithm (docs/local_steps.md).

    What needs variables, or losses and metrics, raises a RuntimeError before there are any, or
    before `compile`.

    Raises:
        TypeError: If `module` is of no known kind.
        ValueError: If an option is invalid, or does not fit the module or another option.
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
        mesh: Mapping[str, int] | Literal["auto"] | None = None,
        sharding_rules: Sequence[Rule] = (),
        pipeline: Pipeline | None = None,
        remat: Remat | Mapping[str, Remat] = "none",
        sync: LocalSteps | None = None,
    ) -> None:
        options = ModelOptions(
            seed_or_default(seed),
            precision,
            trainable,
            frozen,
            synchronize_batch_norm,
            fusion_threshold,
            gradient_compression,
            ranks_per_host,
            shard_optimizer_state,
            reproducible,
            virtual_ranks,
            mesh,
            sharding_rules,
            pipeline,
            remat,
            sync,
        )
        self._core = core = Core(module, variables, options)
        self._shared = shared = Shared(core)
        self.training_state, self.resumption = shared.state, shared.resumption
        self._fit_loop = _fit_loop_of_job()

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
        auto_scale_loss: bool = True,
        *,
        objective: Any = None,
        on_nan: Literal["raise", "skip", "rollback"] | None = None,
    ) -> None:
        """Chooses optimizer, loss and metrics, and starts the optimizer afresh; weights stay.

        Args:
            optimizer: A name, a `tnt_jax.optimizers` object or an Optax transformation.
            loss: A name, a `tnt_jax.losses` object, or a callable `f(targets, outputs) -> [batch,
                ...]`; for several outputs a list in order or a dict by name.
            loss_weights: Factor of each output's loss.
            metrics: Names or `tnt_jax.metrics` objects that ignore sample weights; for several
                outputs a list of lists or a dict.
            weighted_metrics: The same, using sample weights.
            run_eagerly: Must be False; wrap `fit` in `jax.disable_jit()` to debug.
            steps_per_execution: Steps in one compiled program, of which callbacks see the last;
                `"auto"` times the first steps of training and chooses. Batches of another shape,
                such as the last one, run by themselves; callbacks see them as part of their group.
            jit_compile: Accepted as in Keras; steps are always compiled.
            auto_scale_loss: Whether a Keras model in `mixed_float16` gets a `LossScaleOptimizer`.
            objective: A function `f(params, batch, rngs)` in place of loss and metrics; see
                `tnt_jax.keras_compat.compiling.objective.CompiledObjective`.
            on_nan: What follows a step whose loss or gradients are not finite (docs/survival.md).

        Raises:
            ValueError: If a name is unknown (the message lists the known ones), the loss is
                missing, an option is invalid, or a Keras model overrides what a step does
                (docs/keras_models.md).
            RuntimeError: If a callback calls it while `fit` runs.
        """
        if self._core.is_fitting:
            raise RuntimeError(
                "compile was called while fit runs, whose steps it would replace. Call it between "
                "two calls of fit; a callback may set model.optimizer.learning_rate."
            )
        compilation = new_compilation(
            self._core.module,
            run_eagerly=run_eagerly,
            jit_compile=jit_compile,
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            steps_per_execution=steps_per_execution,
            objective=objective,
            auto_scale_loss=auto_scale_loss,
            on_nan=on_nan,
        )
        self._core.check_local_steps(compilation)
        self._core.compilation = compilation
        self._core.forget_passes()
        self._core.fits_memory = False

    def __reduce__(self) -> Any:
        """Refuses copies by `copy` and `pickle`."""
        raise TypeError(
            "A tnt_jax.Model cannot be copied or pickled: its arrays and programs belong to the "
            "devices of its job. tnt_jax.models.clone_model(model) returns another one of the same "
            "module, set_weights gives it the weights, and save and load_model use files."
        )

    @calling("Model.fit")
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
        resume: str | os.PathLike[str] | None = None,
        tnt_ignore_changes: Sequence[str] = (),
        tnt_micro_batch_size: int | Literal["auto"] | None = None,
        tnt_validation_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
        tnt_distribute_validation_dataset: bool = True,
    ) -> History:
        """Trains for `epochs - initial_epoch` epochs and returns their history.

        The history is the same on every process.

        Args:
            x: Arrays `[examples, ...]` (or a dict, tuple or list of them), a `tf.data.Dataset` or
                an iterable of batches `(inputs, targets[, weights])`. Without `y`, a tuple or list
                of arrays is itself `(inputs, targets[, weights])`.
            y: Targets `[examples, ...]`, with arrays only.
            batch_size: Rows of a global batch over all ranks, with arrays only; 32 by default.
            epochs: Number of the last epoch.
            verbose: 0 silent, 1 a bar, 2 one line per epoch; `"auto"` is 1. Only the master prints.
            callbacks: `tnt_jax.callbacks.Callback` objects.
            validation_split: Part of the arrays, from their end, that is held out to validate.
            validation_data: `(x, y)`, `(x, y, weights)` or a dataset, evaluated after epochs; the
                split then has no effect.
            shuffle: Whether arrays get a new order every epoch, by the model's seed.
            class_weight: Weight of each class index, multiplied into the sample weights.
            sample_weight: Weights `[examples]`, with arrays only.
            initial_epoch: Number of epochs that are done already.
            steps_per_epoch: Steps of an epoch; passes over the data then follow one another.
            validation_steps: Batches of an evaluation; all by default.
            validation_batch_size: Global batch of validation arrays; `batch_size` by default.
            validation_freq: Validate every so many epochs, or after the epochs listed (from 1).
            resume: Directory for checkpoints, from which the same script, started again, goes on;
                `"auto"` for that of `TNT_CHECKPOINT_DIR`, or `checkpoints/SCRIPT`. By default
                that of `TNT_CHECKPOINT_DIR`, or no checkpoints. See docs/survival.md.
            tnt_ignore_changes: What may differ from the run that is resumed, such as
                `["learning_rate"]`; by default, a difference is an error that names it.
            tnt_micro_batch_size: Rows of one rank: the global batch is this times the ranks. With
                `"auto"`, the global batch is as without, and each rank computes as many of its rows
                at once as fit its memory, with the same result; see docs/larger_models.md.
            tnt_validation_micro_batch_size: The same for validation.
            tnt_distribute_dataset: False if each process brings a shard, batched for its own ranks.
            tnt_distribute_validation_dataset: The same for validation.

        Raises:
            ValueError: If data and arguments contradict one another.
        """
        directory = choose_directory(resume, callbacks)
        data = DataArguments(
            x, y, sample_weight, batch_size, tnt_micro_batch_size, shuffle, tnt_distribute_dataset
        )
        arguments = FitArguments(
            class_weight,
            initial_epoch,
            epochs,
            steps_per_epoch,
            validation_split,
            validation_data,
            validation_steps,
            validation_batch_size,
            tnt_validation_micro_batch_size,
            validation_freq,
            tnt_distribute_validation_dataset,
            directory,
            check_changes(tnt_ignore_changes),
        )
        calls = CallbackArguments(with_backup(callbacks, directory), verbose, self)
        return self._fit_loop(self._shared, calls).run(data, arguments)

    @calling("Model.evaluate")
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
        tnt_micro_batch_size: int | Literal["auto"] | None = None,
        tnt_distribute_dataset: bool = True,
    ) -> float | list[float] | dict[str, float]:
        """Returns loss and metrics over the data, the same on every process.

        Each example counts once. The result is the loss alone if there are no metrics, else a list
        like `metrics_names`, or a dict by name with `return_dict`. `steps` is the number of
        batches, all by default; the other arguments are those of `fit`.

        Raises:
            ValueError: If data and arguments contradict one another.
        """
        data = DataArguments(
            x, y, sample_weight, batch_size, tnt_micro_batch_size, distribute=tnt_distribute_dataset
        )
        calls = CallbackArguments(callbacks, verbose, self)
        return as_returned(evaluate(self._shared, data, steps, calls), return_dict)

    @calling("Model.predict")
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        *,
        tnt_micro_batch_size: int | Literal["auto"] | None = None,
        tnt_distribute_dataset: bool = True,
    ) -> Any:
        """Returns the model's outputs `[examples, ...]` as NumPy arrays, in full on every process.

        They are in the order of the data. The model need not be compiled. Targets that the data
        holds are ignored; a tuple `x` of arrays are inputs if the module takes so many, else
        `(inputs, targets)`. `steps` is the number of batches, all by default; the other arguments
        are those of `fit`.
        """
        data = DataArguments(
            x,
            None,
            None,
            batch_size,
            tnt_micro_batch_size,
            distribute=tnt_distribute_dataset,
            predicts=True,
        )
        return predict(self._shared, data, steps, CallbackArguments(callbacks, verbose, self))

    @calling("Model.build")
    def build(self, inputs: Any) -> None:
        """Creates the variables for inputs of a known shape.

        Args:
            inputs: A shape such as `(None, 28, 28, 1)` for one float32 input, or a pytree of sample
                arrays or `jax.ShapeDtypeStruct` with a leading batch dimension.

        Raises:
            ValueError: If a size but the first is None.
        """
        is_shape = isinstance(inputs, (tuple, list)) and all(
            size is None or isinstance(size, (int, np.integer)) for size in inputs
        )
        if is_shape and None in inputs[1:]:
            raise ValueError(
                f"build needs all sizes of a row but the number of rows, and in {tuple(inputs)} "
                f"dimension {inputs.index(None, 1)} is None. Give it a size, or pass sample arrays."
            )
        trainer = self._core.trainer
        trainer.build(jax.ShapeDtypeStruct((1, *inputs[1:]), np.float32) if is_shape else inputs)
        trainer.require_state()  # Errors of the program that makes variables come here.

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        custom_objects: Mapping[str, Any] | None = None,
        *,
        trust: bool = False,
    ) -> Self:
        """Returns a model of this class from a result of `get_config`; see `model_from_config`."""
        rebuild = Rebuilder(custom_objects=custom_objects, trust=trust, caller="model_from_config")
        return model_from(config, rebuild, cls)

    def compile_from_config(
        self, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> None:
        """Calls `compile` with what `get_compile_config` returned.

        Raises:
            ValueError: If a name is unknown, and not that of one of the user's `custom_objects`.
        """
        modules = {"optimizer": "optimizers", "metrics": "metrics", "weighted_metrics": "metrics"}
        given = {
            name: resolved(value, modules.get(name, "losses"), custom_objects)
            for name, value in config.items()
        }
        self.compile(**given)

    def view(self, module: Any) -> Self:
        """Returns a model that applies another module to this model's current variables.

        It evaluates (after its own `compile`) and predicts but cannot be trained. Use it, for
        instance, to decode token after token with a Transformer that was trained in parallel.

        Args:
            module: Module of the same library, whose variables are among this model's, at the same
                paths.
        """
        options = self._core.options
        other = type(self)(module, seed=options.seed, **options.for_adapter())
        other._core.view(self._core.trainer)
        return other

    @property
    def built(self) -> bool:
        """Whether the model has variables, or makes them as soon as they are asked for."""
        return self.training_state.built

    @property
    def state(self) -> TrainState:
        """The whole training state, on the devices."""
        return self.training_state.state

    def set_state(self, state: TrainState) -> None:
        """Replaces the whole training state by one of the same structure."""
        self._core.trainer.set_state(state)

    @property
    def optimizer(self) -> OptimizerView | None:
        """The optimizer, with `iterations` and a `learning_rate` to set; None before `compile`."""
        return self.training_state.optimizer

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of all arrays: in Keras's order, or parameters before model state."""
        return self.training_state.get_weights()

    @calling("Model.set_weights")
    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Replaces all arrays, on every process by those of the master, but no optimizer state.

        Args:
            weights: Arrays as `get_weights` returns them.

        Raises:
            ValueError: If the number of arrays or a shape differs.
        """
        self.training_state.set_weights(weights)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that a saved or cloned model is made with."""
        return self._core.options.saved()

    @property
    def module(self) -> Any:
        """The module that was wrapped.

        In a callback its variables have the values of the last step: an NNX module or a Keras model
        gets copies when this attribute is read. What a callback assigns to them, alike on every
        process, counts from the next step on.
        """
        return self._core.current_module

    def write_back(self) -> None:
        """Stores the trained variables in the wrapped object, unless that is a Linen module.

        `fit` does so when it ends or is interrupted, and the attribute `module` when it is read.
        """
        self._core.write_back()

    @property
    def history(self) -> History | None:
        """The history of the last `fit`; None before the first."""
        return self._shared.progress.history

    @history.setter
    def history(self, value: History | None) -> None:
        self._shared.progress.history = value

    @property
    def stop_training(self) -> bool:
        """Set it to True in a callback to end training after the current step."""
        return self._shared.progress.stop_training

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        self._shared.progress.stop_training = value

    @property
    def stop_evaluating(self) -> bool:
        """The same for an evaluation, whose result is then that of the steps so far."""
        return self._shared.progress.stop_evaluating

    @stop_evaluating.setter
    def stop_evaluating(self, value: bool) -> None:
        self._shared.progress.stop_evaluating = value

    @property
    def stop_predicting(self) -> bool:
        """The same for a prediction."""
        return self._shared.progress.stop_predicting

    @stop_predicting.setter
    def stop_predicting(self, value: bool) -> None:
        self._shared.progress.stop_predicting = value

    @property
    def rows_in_batch(self) -> int:
        """Real rows of the global batch in the current step."""
        return self._shared.progress.rows_in_batch

    @property
    def epoch_sums(self) -> Any:
        """Sums behind the logs of the epoch so far, on the devices, or None."""
        return self._shared.progress.epoch_sums

    @property
    def is_compiling(self) -> bool:
        """Whether the next step is compiled first, because its batch has a new shape."""
        return self._shared.progress.is_compiling

    # Keras's TensorBoard callback asks for a graph to draw, which a jitted step does not have; its
    # BackupAndRestore sets the epoch with which training goes on.
    train_function = None

    @property
    def _initial_epoch(self) -> int | None:
        return self.resumption.initial_epoch

    @_initial_epoch.setter
    def _initial_epoch(self, value: int | None) -> None:
        self.resumption.initial_epoch = value

    @property
    def _trainer(self) -> Trainer:
        return self._core.trainer


def _fit_loop_of_job() -> type[FitLoop]:
    """Returns what runs `fit` in this job: training, or what a command of `tnt-jax` asks for."""
    names = [f"TNT_{name}_STEPS" for name in ("TUNE", "SCALE", "RECORD", "EXPLAIN")]
    settings = read_settings({name: os.environ.get(name, "") for name in (*names, "TNT_PLAN")})
    if settings == Settings():
        return FitLoop
    # Training needs none of them.
    from tnt_jax.keras_compat.fit.trials import explained, recorded, timed

    if settings.record_steps is not None:
        return recorded.RecordedLoop
    if settings.explain_steps is not None:
        return explained.ExplainLoop
    if settings.scale_steps is not None and settings.tune_steps is None:
        return timed.ScaleLoop
    return timed.PlanLoop if settings.plan else timed.TrialLoop
