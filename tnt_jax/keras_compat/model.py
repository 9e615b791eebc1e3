"""`Model`: Keras's compile, fit, evaluate and predict for Flax and Keras models on all devices."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tnt_jax.distributed.stall import called
from tnt_jax.keras_compat.building import Builder
from tnt_jax.keras_compat.callbacks import History
from tnt_jax.keras_compat.choose_loop import choose_fit_loop
from tnt_jax.keras_compat.compilation import compile_from_config, new_compilation
from tnt_jax.keras_compat.core import Core
from tnt_jax.keras_compat.data_intake import DataArguments, DataIntake
from tnt_jax.keras_compat.described_models import from_config
from tnt_jax.keras_compat.evaluation import Evaluator, Predictor, as_returned
from tnt_jax.keras_compat.fit_plan import FitArguments
from tnt_jax.keras_compat.hooks import CallbackArguments
from tnt_jax.keras_compat.inspector import Inspector
from tnt_jax.keras_compat.model_state import ModelState
from tnt_jax.keras_compat.offered import AttributeOf, SettableAttributeOf, method_of
from tnt_jax.keras_compat.optimizer_view import OptimizerView
from tnt_jax.keras_compat.options import ModelOptions
from tnt_jax.keras_compat.preparation import Preparation
from tnt_jax.keras_compat.progress import Progress
from tnt_jax.keras_compat.resume import (
    Resumption,
    check_changes,
    choose_directory,
    with_backup,
)
from tnt_jax.keras_compat.saver import Saver
from tnt_jax.keras_compat.single_batches import SingleBatches
from tnt_jax.keras_compat.state_variable import StateVariable
from tnt_jax.keras_compat.views import view
from tnt_jax.seeding import seed_or_default
from tnt_jax.sharded import Pipeline, Remat, Rule
from tnt_jax.train.garbage import collected_later
from tnt_jax.train.state import TrainState
from tnt_jax.train.trainer import Trainer


class Model:
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

    Attributes:
        history: The `History` of the last `fit`.
        stop_training: Set it to True in a callback to end training after the current step.
        stop_evaluating: The same for an evaluation, whose result is then that of the steps so far.
        stop_predicting: The same for a prediction.
        rows_in_batch: Real rows of the global batch in the current step.
        epoch_sums: Sums behind the logs of the epoch so far, on the devices, or None.
        is_compiling: Whether the next step is compiled first, because its batch has a new shape.
        training_state: What changes the whole state, for `load_model`.
        resumption: Where a callback says that an interrupted `fit` goes on.
        saver: What writes files, for callbacks in the background, too.

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
    ) -> None:
        options = ModelOptions(
            seed_or_default(seed), precision, trainable, frozen, synchronize_batch_norm,
            fusion_threshold, gradient_compression, ranks_per_host, shard_optimizer_state,
            reproducible, virtual_ranks, mesh, sharding_rules, pipeline, remat,
        )  # fmt: skip
        self._core = core = Core(module, variables, options)
        self._progress = progress = Progress()
        self._builder = builder = Builder(core)
        self._intake = intake = DataIntake(core, builder)
        self.training_state = state = ModelState(core)
        preparation = Preparation(core, state, builder)
        self.resumption = Resumption(core, progress)
        self._evaluator = evaluator = Evaluator(core, intake, preparation, progress)
        self._predictor = Predictor(core, intake, builder, preparation, progress)
        self._fit_loop = choose_fit_loop()(
            core, state, intake, preparation, evaluator, self.resumption, progress
        )
        self._single_batches = SingleBatches(core, intake, builder, preparation, progress)
        self.saver = Saver(core, state)
        self._inspector = Inspector(core, state, intake, preparation, progress)

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
                such as the last one, run by themselves.
            jit_compile: Accepted as in Keras; steps are always compiled.
            auto_scale_loss: Whether a Keras model in `mixed_float16` gets a `LossScaleOptimizer`.
            objective: A function `f(params, batch, rngs)` in place of loss and metrics; see
                `tnt_jax.keras_compat.objective.CompiledObjective`.
            on_nan: What follows a step whose loss or gradients are not finite (docs/survival.md).

        Raises:
            ValueError: If a name is unknown (the message lists the known ones), the loss is
                missing, an option is invalid, or a Keras model overrides what a step does
                (docs/keras_models.md).
        """
        self._core.compilation = new_compilation(
            self._core.module, run_eagerly=run_eagerly, jit_compile=jit_compile,
            optimizer=optimizer, loss=loss, loss_weights=loss_weights,
            metrics=metrics, weighted_metrics=weighted_metrics,
            steps_per_execution=steps_per_execution, objective=objective,
            auto_scale_loss=auto_scale_loss, on_nan=on_nan,
        )  # fmt: skip

    @called("Model.fit")
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
        tnt_micro_batch_size: int | None = None,
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
            validation_data: `(x, y)`, `(x, y, weights)` or a dataset, evaluated after epochs.
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
            tnt_micro_batch_size: Rows of one rank: the global batch is this times the ranks.
            tnt_validation_micro_batch_size: The same for validation.
            tnt_distribute_dataset: False if each process brings a shard, batched for its own ranks.
            tnt_distribute_validation_dataset: The same for validation.

        Raises:
            RuntimeError: If the model was not compiled.
            ValueError: If data and arguments contradict one another.
        """
        directory = choose_directory(resume, callbacks)
        data = DataArguments(
            x, y, sample_weight, batch_size, tnt_micro_batch_size, shuffle, tnt_distribute_dataset
        )
        arguments = FitArguments(
            class_weight, initial_epoch, epochs, steps_per_epoch, validation_split, validation_data,
            validation_steps,
            validation_batch_size, tnt_validation_micro_batch_size, validation_freq,
            tnt_distribute_validation_dataset, directory, check_changes(tnt_ignore_changes),
        )  # fmt: skip
        calls = CallbackArguments(with_backup(callbacks, directory), verbose, self)
        with self._fit_loop.ending_on_request(calls):
            with collected_later():
                plan = self._fit_loop.prepare(data, arguments)
            return self._fit_loop.fit(plan, calls)

    @called("Model.evaluate")
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
        """Returns loss and metrics over the data, the same on every process.

        Each example counts once. The result is the loss alone if there are no metrics, else a list,
        or a dict with `return_dict`.

        Args:
            x: Data as in `fit`.
            y: As in `fit`.
            batch_size: As in `fit`.
            verbose: As in `fit`.
            sample_weight: As in `fit`.
            steps: Batches to evaluate; all by default.
            callbacks: As in `fit`.
            return_dict: Whether to return a dict by name instead of a list like `metrics_names`.
            tnt_micro_batch_size: As in `fit`.
            tnt_distribute_dataset: As in `fit`.

        Raises:
            RuntimeError: If the model was not compiled.
            ValueError: If data and arguments contradict one another.
        """
        data = DataArguments(
            x, y, sample_weight, batch_size, tnt_micro_batch_size, distribute=tnt_distribute_dataset
        )
        logs = self._evaluator.evaluate(data, steps, CallbackArguments(callbacks, verbose, self))
        return as_returned(logs, return_dict)

    @called("Model.predict")
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
        """Returns the model's outputs `[examples, ...]` as NumPy arrays, in full on every process.

        They are in the order of the data. The model need not be compiled. Targets that the data
        holds are ignored.

        Args:
            x: Data as in `fit`; a tuple of arrays are inputs if the module takes so many, else
                `(inputs, targets)`.
            batch_size: As in `fit`.
            verbose: As in `fit`.
            steps: Batches to predict; all by default.
            callbacks: As in `fit`.
            tnt_micro_batch_size: As in `fit`.
            tnt_distribute_dataset: As in `fit`.
        """
        data = DataArguments(
            x, None, None, batch_size, tnt_micro_batch_size,
            distribute=tnt_distribute_dataset, predicts=True,
        )  # fmt: skip
        return self._predictor.predict(data, steps, CallbackArguments(callbacks, verbose, self))

    @called("Model.build")
    def build(self, inputs: Any) -> None:
        """Creates the variables for inputs of a known shape.

        Args:
            inputs: A shape such as `(None, 28, 28, 1)` for one float32 input, or a pytree of sample
                arrays or `jax.ShapeDtypeStruct` with a leading batch dimension.
        """
        self._builder.build(inputs)

    view = view
    compile_from_config = compile_from_config
    from_config = classmethod(from_config)

    # What the parts do, under the same names.
    options = AttributeOf[dict[str, Any]]("_core", Core, "saved_options")
    module = AttributeOf[Any]("_core", Core, "current_module")
    write_back = method_of("_core", Core.write_back)
    compiled_kinds = AttributeOf[set[Any]]("_core", Core)
    history = SettableAttributeOf[History | None]("_progress", Progress)
    stop_training = SettableAttributeOf[bool]("_progress", Progress)
    stop_evaluating = SettableAttributeOf[bool]("_progress", Progress)
    stop_predicting = SettableAttributeOf[bool]("_progress", Progress)
    rows_in_batch = SettableAttributeOf[int]("_progress", Progress)
    epoch_sums = SettableAttributeOf[Any]("_progress", Progress)
    is_compiling = SettableAttributeOf[bool]("_progress", Progress)

    train_on_batch = method_of("_single_batches", SingleBatches.train_on_batch)
    test_on_batch = method_of("_single_batches", SingleBatches.test_on_batch)
    predict_on_batch = method_of("_single_batches", SingleBatches.predict_on_batch)
    reset_metrics = method_of("_single_batches", SingleBatches.reset_metrics)
    __call__ = method_of("_single_batches", SingleBatches.call)
    get_metrics_result = method_of("_single_batches", SingleBatches.get_metrics_result)

    built = AttributeOf[bool]("training_state", ModelState)
    state = AttributeOf[TrainState]("training_state", ModelState)
    set_state = method_of("training_state", ModelState.set_state)
    optimizer = AttributeOf[OptimizerView | None]("training_state", ModelState)
    get_weights = method_of("training_state", ModelState.get_weights)
    set_weights = method_of("training_state", ModelState.set_weights)

    save = method_of("saver", Saver.save)
    save_weights = method_of("saver", Saver.save_weights)
    load_weights = method_of("saver", Saver.load_weights)
    get_config = method_of("saver", Saver.get_config)
    to_json = method_of("saver", Saver.to_json)

    name = AttributeOf[str]("_inspector", Inspector)
    compiled = AttributeOf[bool]("_inspector", Inspector)
    summary = method_of("_inspector", Inspector.summary)
    count_params = method_of("_inspector", Inspector.count_params)
    variables = AttributeOf[Any]("_inspector", Inspector)
    trainable = SettableAttributeOf[bool]("_inspector", Inspector)
    layers = AttributeOf[list[Any]]("_inspector", Inspector)
    get_layer = method_of("_inspector", Inspector.get_layer)
    weights = AttributeOf[list[StateVariable]]("_inspector", Inspector)
    weights_by_path = method_of("_inspector", Inspector.weights_by_path)
    trainable_weights = AttributeOf[list[StateVariable]]("_inspector", Inspector)
    non_trainable_weights = AttributeOf[list[StateVariable]]("_inspector", Inspector)
    trainable_variables = AttributeOf[list[StateVariable]]("_inspector", Inspector)
    non_trainable_variables = AttributeOf[list[StateVariable]]("_inspector", Inspector)
    metrics = AttributeOf[list[Any]]("_inspector", Inspector)
    metrics_names = AttributeOf[list[str]]("_inspector", Inspector)
    metrics_by_log = AttributeOf[dict[str, Any]]("_inspector", Inspector)
    get_compile_config = method_of("_inspector", Inspector.get_compile_config)
    plot_history = method_of("_inspector", Inspector.plot_history)
    lowered_text = method_of("_inspector", Inspector.lowered_text)
    describe_collectives = method_of("_inspector", Inspector.describe_collectives)

    # Keras's TensorBoard callback asks for a graph to draw, which a jitted step does not have; its
    # BackupAndRestore sets the epoch with which training goes on.
    train_function = None
    _initial_epoch = SettableAttributeOf[int | None]("resumption", Resumption, "initial_epoch")
    _trainer = AttributeOf[Trainer]("_core", Core, "trainer")
