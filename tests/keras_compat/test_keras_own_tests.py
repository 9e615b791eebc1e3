"""Keras's own tests pass with our optimizers and schedules in the place of Keras's, but for those
that are left out with a reason.
"""

import pkgutil
import unittest

import keras
import pytest
from keras_own import cases

PACKAGES = {"optimizers": keras.src.optimizers, "schedules": keras.src.optimizers.schedules}
MODULES = [
    f"{package.__name__}.{found.name}" for package in PACKAGES.values() for found in pkgutil.iter_modules(package.__path__)
    if found.name.endswith("_test")
]  # fmt: skip
# Modules and tests that are left out, and why.
MODULES_LEFT_OUT = {
    "multi_optimizer_test": "optax.partition gives each part of the parameters a rule of its own",
    "optimizer_sparse_test": "sparse gradients",
}
_REASONS = {
    "looks at a private method or attribute": """MuonTest.test_Newton_Schulz MuonTest.test_adamw_single_step
        MuonTest.test_adamw_weight_decay MuonTest.test_lr_adjust_2d MuonTest.test_lr_adjust_none MuonTest.test_muon_single_step
        MuonTest.test_muon_weight_decay MuonTest.test_should_use_adamw NadamTest.test_build_with_empty_var_list""",
    "`transformation()` is the stateless form of every optimizer, and its state holds what Keras's variables hold": """
        LossScaleOptimizerTest.test_downscaling_stateless LossScaleOptimizerTest.test_finite_step_stateless
        LossScaleOptimizerTest.test_finite_step_with_inner_loss_scale_stateless LossScaleOptimizerTest.test_infinite_step_stateless
        LossScaleOptimizerTest.test_iterations_update_stateless LossScaleOptimizerTest.test_upscaling_stateless
        OptimizerTest.test_set_weights""",
    "float8 layers of Keras hand statistics over as gradients": """OptimizerTest.test_overwrite_with_gradient
        OptimizerTest.test_overwrite_with_gradient_with_gradient_accumulation
        LossScaleOptimizerTest.test_finite_step_with_overwrite_stateless""",
    "the training step honours constraints, not the optimizer": "OptimizerTest.test_constraints_are_applied",
    "targets of another shape than the outputs are refused": "OptimizerTest.test_ema_with_model_fit",
    "the model holds what an optimizer counts: see `model.optimizer`": "TestFitLRSchedulesFlow.test_fit_lr_correctness",
    "names are not counted up": "OptimizerTest.test_optimizer_auto_naming",
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
    marks = getattr(getattr(test, test._testMethodName), "pytestmark", ())
    return any(mark.name == "skipif" and any(mark.args) for mark in marks)


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.rpartition(".")[2] not in MODULES_LEFT_OUT]
)
def test_keras_own_tests_pass(module, use_ranks):
    use_ranks(1)
    result, names = unittest.TestResult(), set()
    for case in cases(module):
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
            if not is_skipped(test):
                test.run(result)
                names.add(_name(test))
    failed = {_name(test): text for test, text in result.failures + result.errors}
    assert names
    assert set(failed) == LEFT_OUT & names, "\n".join(
        text for name, text in failed.items() if name not in LEFT_OUT
    )


def _name(test):
    return f"{type(test).__name__}.{test._testMethodName}"
