"""Training of Keras models: overridden methods, constraints on variables, scaled losses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.optimizers import LossScaleOptimizer, Optimizer
from tnt_jax.keras_compat.optimizers.from_keras import KerasOptimizer

# Methods by which a Keras model changes fit and evaluate, and those for predict.
_OF_TRAINING = """
    train_step test_step compute_loss compute_metrics get_metrics_result compute_loss_and_updates
    stateless_compute_loss make_train_function make_test_function
""".split()
_OF_PREDICTION = ("predict_step", "make_predict_function")


def check_training_methods(module: Any) -> None:
    """Raises a ValueError if a Keras model overrides parts of `fit` or `evaluate` steps."""
    if overridden := _overridden(module, _OF_TRAINING):
        raise ValueError(
            f"The Keras model {module.name!r} overrides {', '.join(overridden)}, which would not "
            "be called: the step here works on one rank's rows. Use compile(objective=...), a "
            "function of parameters and batch, or loss, metrics and add_loss instead."
        )


def check_prediction_methods(module: Any) -> None:
    """Raises a ValueError if a Keras model overrides parts of a `predict` step."""
    if overridden := _overridden(module, _OF_PREDICTION):
        raise ValueError(
            f"The Keras model {module.name!r} overrides {', '.join(overridden)}, which would not "
            "be called. Do what it does in call(), or to the outputs that predict returns."
        )


def choose_optimizer(identifier: Any, module: Any, *, auto_scale_loss: bool) -> Optimizer:
    """Returns the user's optimizer, with loss scaling for a Keras model in `mixed_float16`."""
    # The table of all optimizers is imported when one is asked for.
    from tnt_jax.keras_compat.optimizers.lookup import required

    optimizer = required(identifier)
    # Unlike in Keras the layers are checked: a loaded model has the policy of the process.
    layers = module._flatten_layers() if is_keras(module) else ()
    is_half = any(layer.dtype_policy.name == "mixed_float16" for layer in layers)
    if auto_scale_loss and is_half and not isinstance(optimizer, LossScaleOptimizer):
        return LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    return optimizer


def transformation_of(
    optimizer: Optimizer, variables: Callable[[], Mapping[str, Any]] | None
) -> optax.GradientTransformation:
    """Returns the transformation of an optimizer that also applies the variables' constraints.

    The variables are those of a Keras model; None for other models, which have no constraints.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        # Inside the scaling: a skipped step applies no constraint.
        return optimizer.scaled(transformation_of(optimizer.inner_optimizer, variables))
    if isinstance(optimizer, KerasOptimizer):
        transformation = optimizer.transformation_for(variables or dict)
    else:
        transformation = optimizer.transformation()
    if variables is None:
        return transformation
    return _constrained(
        transformation, variables, accumulates=optimizer.gradient_accumulation_steps is not None
    )


def _constrained(
    optimizer: optax.GradientTransformation,
    variables: Callable[[], Mapping[str, Any]],
    *,
    accumulates: bool,
) -> optax.GradientTransformation:
    """Returns a transformation whose updates satisfy the constraints of the variables."""

    def constraints() -> dict[str, Callable]:
        return {path: v.constraint for path, v in variables().items() if v.constraint is not None}

    def init(params: Any) -> Any:
        if accumulates:
            _check_start(params, constraints())
        return optimizer.init(params)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates: Any
        updates, state = optimizer.update(grads, state, params)
        chosen = {path: constraint for path, constraint in constraints().items() if path in updates}
        if chosen:
            updates = type(updates)(updates)
        for path, constraint in chosen.items():
            old = params[path]
            updates[path] = (jnp.asarray(constraint(old + updates[path])) - old).astype(old.dtype)
        return updates, state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _check_start(params: Any, constraints: Mapping[str, Callable]) -> None:
    for path, constraint in constraints.items():
        start = params.get(path)
        if (
            start is None
            or isinstance(start, Tracer)
            or np.allclose(constraint(jnp.asarray(start)), start, rtol=1e-5, atol=1e-6)
        ):
            continue
        raise ValueError(
            f"The weight {path!r} starts outside its constraint. With gradient_accumulation_steps "
            "Keras constrains it before the first update, which tnt_jax does not. Assign a value "
            "that the constraint allows, or leave accumulation out."
        )


def _overridden(module: Any, names: Sequence[str]) -> list[str]:
    if not is_keras(module):
        return []
    import keras

    # Another version of Keras may lack one of them.
    known = [name for name in names if hasattr(keras.Model, name)]
    return [
        name
        for name in known
        if getattr(type(module), name) is not getattr(keras.Model, name)
        or callable(vars(module).get(name))
    ]
