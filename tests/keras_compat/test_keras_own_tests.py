"""Keras's own tests pass with our losses, metrics, optimizers, schedules, callbacks and saving in
the place of Keras's, and with our model doing what Keras's does, but for those that are left out
with a reason.
"""

import contextlib
import fnmatch
import pkgutil
import unittest

import keras
import pytest
from keras_own import OF_MODELS, cases, training_by_ours

PACKAGES = [
    keras.src.losses,
    keras.src.metrics,
    keras.src.optimizers,
    keras.src.optimizers.schedules,
    keras.src.callbacks,
    keras.src.trainers,
    keras.src.models,
    keras.src.saving,
    keras.src.legacy.saving,
]
MODULES = [
    f"{package.__name__}.{found.name}"
    for package in PACKAGES
    for found in pkgutil.iter_modules(package.__path__)
    if found.name.endswith("_test")
]
MODULES = [
    name
    for name in MODULES
    if name in OF_MODELS or not name.startswith(("keras.src.trainers", "keras.src.models"))
]
LONG = (
    "saving_lib_test",
    "optimizer_sparse_test",
    "orbax_checkpoint_test",
    "trainer_test",
    # Losses and metrics are compared with Keras's in test_losses_metrics_beside_keras.py, models of
    # several outputs in test_compiled_beside_keras.py, all in less time.
    "losses_test",
    "confusion_metrics_test",
    "iou_metrics_test",
)
# Modules and tests that are left out, and why.
MODULES_LEFT_OUT = {
    "multi_optimizer_test": "optax.partition gives each part of the parameters a rule of its own",
    "remote_monitor_test": "replaces a function of requests, which we do not use",
    "file_editor_test": "has no saved model of ours",
    "json_utils_test": "has no saved model of ours",
    "object_registration_test": "has no saved model of ours",
    "serialization_lib_test": "has no saved model of ours",
}
NEEDS_TENSORFLOW = ("swap_ema_weights_test", "tensorboard_test")
# Trains on random numbers, some of which are no probabilities, which is refused; need PyTorch, or
# processes that read data.
NOT_RUN = [
    "SensitivityAtSpecificityTest.test_handles_sas_metrics",
    "ModelTest.test_functional_dict_outputs_with_single_tensor",
    "ModelTest.test_functional_list_outputs_list_losses_abbr",
    "TestTrainer.test_fit_with_data_adapter_torch*",
    "TestTrainer.test_fit_with_data_adapter_py_dataset_multiprocessing*",
]
# What looks inside Keras, and says nothing of ours.
_INTERNAL = {
    "looks at a private method or attribute": """MuonTest.test_Newton_Schulz MuonTest.test_adamw_single_step
        MuonTest.test_adamw_weight_decay MuonTest.test_lr_adjust_2d MuonTest.test_lr_adjust_none MuonTest.test_muon_single_step
        MuonTest.test_muon_weight_decay MuonTest.test_should_use_adamw NadamTest.test_build_with_empty_var_list
        OptimizerSparseTest.test_sparse_gradients_loss_scale_optimizer_sgd
        TestTrainer.test_fit_eval_flow_for_jax_model_weights TestTrainer.test_symbolic_build
        FBetaScoreTest.test_non_2d_input_shapes_raises_value_error FBetaScoreTest.test_undefined_output_dim_raises_value_error
        BackupAndRestoreCallbackTest.test_backup_corrupted BackupAndRestoreCallbackTest.test_best_case_epoch
        BackupAndRestoreCallbackTest.test_best_case_step OrbaxCheckpointTest.test_checkpoint_with_assets0
        OrbaxCheckpointTest.test_checkpoint_with_assets1""",
    "replaces the variable of a sum by another": "MeanIoUTest.test_big_chunk",
    "looks for Keras's metrics or optimizer in the compiled Keras model": """TestTrainer.test_metric_tracking
        TestTrainer.test_nested_trainer_metrics* TestTrainer.test_multiple_compiles
        TestTrainer.test_adds_loss_scaling_optimizer ModelTest.test_?et_state_tree""",
    "counts how often Keras traces its steps": "TestTrainer.test_retracing*",
    "looks for functions and enumerations of Keras": """EarlyStoppingTest.test_early_stopping
        MonitorCallbackTest.test_monitor_op_logic AUCTest.test_config AUCTest.test_config_manual_thresholds""",
    "looks for the words or the logger of Keras, or for the names of its folders": """ModelCheckpointTest.test_model_checkpoint_options
        LearningRateSchedulerTest.test_verbose_logging ReduceLROnPlateauTest.test_verbose_logging
        OrbaxCheckpointTest.test_save_freq_epoch""",
    "writes or traces through TensorFlow": "TestTensorBoardV2.test_TensorBoard_auto_trace TestTensorBoardV2.test_custom_summary",
    "sets keras.distribution, which a wrapped model refuses": """
        JAXTrainerCorrectnessTest.test_jit_fit_with_out_shardings_logic_distributed
        OrbaxCheckpointTest.test_distributed_checkpoint_functionality
        OrbaxCheckpointTest.test_distributed_checkpoint_resharding""",
    "`transformation()` is the stateless form of every optimizer, and its state holds what Keras's variables hold": """
        LossScaleOptimizerTest.test_downscaling_stateless LossScaleOptimizerTest.test_finite_step_stateless
        LossScaleOptimizerTest.test_finite_step_with_inner_loss_scale_stateless LossScaleOptimizerTest.test_infinite_step_stateless
        LossScaleOptimizerTest.test_iterations_update_stateless LossScaleOptimizerTest.test_upscaling_stateless
        OptimizerTest.test_set_weights OptimizerSparseTest.test_sparse_correctness_loss_scale_optimizer_sgd""",
    "saves to a file object, which Keras's public functions do not": "SavingTest.test_save_to_fileobj",
    "needs a file that Keras's package lacks": """
        SavingBattleTest.test_legacy_load_skips_missing_nested_containers""",
    "compares the classes of Keras's optimizer and ours": """
        SavingTest.test_compile_preserved_subclassed*""",
    "float8 layers of Keras hand statistics over as gradients": """OptimizerTest.test_overwrite_with_gradient
        OptimizerTest.test_overwrite_with_gradient_with_gradient_accumulation
        LossScaleOptimizerTest.test_finite_step_with_overwrite_stateless""",
    "holds that Keras's configuration forgets delta and axis, or that Keras on JAX takes the last axis only": """
        losses_test/CosineSimilarityTest.test_config HuberLossTest.test_config
        SparseCategoricalCrossentropyTest.test_binary_segmentation_different_axis
        SparseCategoricalCrossentropyTest.test_multi_class_segmentation_different_axis""",
}
# Where ours differs; see `keras_counterparts.LEFT_OUT`.
_REASONS = _INTERNAL | {
    "`losses.get` returns a Loss for the name of a function, too": "LossTest.test_get_method LossTest.test_pickle",
    "logits for a metric or a loss of probabilities, or the reverse, are refused": """
        TestTensorBoardV2.test_TensorBoard_projector_callback""",
    "fractions of a weight count": "MeanIoUTest.test_user_warning_float_weight",
    "R2Score takes outputs [rows], too": "R2ScoreTest.test_errors",
    "the training step honours constraints, not the optimizer": "OptimizerTest.test_constraints_are_applied",
    "targets of another shape than the outputs are refused": "OptimizerTest.test_ema_with_model_fit",
    "the model holds what an optimizer counts: see `model.optimizer`": "TestFitLRSchedulesFlow.test_fit_lr_correctness",
    "names are not counted up": "OptimizerTest.test_optimizer_auto_naming",
    "attributes of the wrapped model are those of `model.module`": "CallbackTest.test_model_state_is_current_on_epoch_end",
    "overrides what a step does, which `compile` refuses": """TestTrainer.test_fit_with_custom_train_step
        TestTrainer.test_evaluate_with_custom_* TestTrainer.test_compute_loss_no_training*
        TestTrainer.test_fwd_pass_loss_presence* TestTrainer.test_metric_update_in_compute_loss
        ModelTest.test_functional_list_outputs_with_custom_compute_loss""",
    "an epoch never has more steps than steps_per_epoch": """
        TestTrainer.test_steps_per_execution_steps_per_epoch_match_multi_epoch*""",
    "a metric needs one value per row": "TestTrainer.test_evaluate_return_list_respect_metrics_order",
    "a loss takes one output, not a structure of them": """ModelTest.test_functional_deeply_nested_outputs_struct_losses
        ModelTest.test_functional_struct_outputs_dict_struct_losses* ModelTest.test_functional_struct_outputs_namedtuple*
        ModelTest.test_functional_struct_outputs_struct_losses[0167]""",
    "the seed generators of the model keep their states": "TestTrainer.test_rng_updated_during_predict",
    "keras.config limits Keras's own training": "TestTrainer.test_max_epochs_and_steps",
    "a name that no output has is a ValueError": "ModelTest.test_functional_dict_outputs_dict_losses_invalid_keys",
    "None is no input": "ModelTest.test_functional_optional_inputs_optional_none",
    "a missing file is a FileNotFoundError": "LoadModelTests.test_load_keras_not_zip",
    "a model without variables is a RuntimeError": """
        SavingTest.test_load_weights_only_with_unbuilt_model SavingTest.test_save_weights_only_with_unbuilt_model
        LegacyH5WholeModelTest.test_nested_layers""",
    "an error while saving leaves no file": """SavingTest.test_save_model_exception_raised_high_memory_config
        SavingTest.test_save_model_exception_raised_low_memory_config""",
    "the optimizer of a model that is not compiled is None": """
        LegacyH5WholeModelTest.test_saving_include_optimizer_false""",
    "the directory is made with the first checkpoint": "OrbaxCheckpointTest.test_initial_value_threshold",
}
LEFT_OUT = {name for names in _REASONS.values() for name in names.split()}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODULES, reason="this Keras comes without its tests"),
]


def is_skipped(test):
    """Tells whether a test is for another backend: such marks are pytest's, which does not run
    it.
    """
    marks = [
        *getattr(getattr(test, test._testMethodName), "pytestmark", ()),
        *getattr(test, "pytestmark", ()),
    ]
    return any(mark.name == "skipif" and any(mark.args) for mark in marks)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.long) if name.endswith(LONG) else name
        for name in MODULES
        if name.rpartition(".")[2] not in MODULES_LEFT_OUT
    ],
)
def test_keras_own_tests_pass(module, use_ranks):
    use_ranks(1)
    if module.rpartition(".")[2] in NEEDS_TENSORFLOW:
        pytest.importorskip("tensorflow", reason="Keras writes its event files through TensorFlow.")
    result, names = unittest.TestResult(), set()
    trains = training_by_ours() if module in OF_MODELS else contextlib.nullcontext()
    with trains:
        for case in cases(module):
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
                if not (is_skipped(test) or _is_one_of(_name(test), NOT_RUN)):
                    test.run(result)
                    names.add(_name(test))
    failed = {_name(test): text for test, text in result.failures + result.errors}
    assert names
    # A name that several modules have is given with its module.
    left_out = {name.removeprefix(f"{module.rpartition('.')[2]}/") for name in LEFT_OUT}
    expected = {name for name in names if _is_one_of(name, left_out)}
    assert set(failed) == expected, "\n".join(
        f"{name}: {text}" for name, text in failed.items() if name not in expected
    )


def _is_one_of(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _name(test):
    test = getattr(test, "test_case", test)  # Of a subtest.
    return f"{type(test).__name__}.{test._testMethodName}"
