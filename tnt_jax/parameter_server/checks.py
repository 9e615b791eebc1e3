"""Refuses what a parameter server cannot do, before anything is started."""

from typing import Any

from tnt_jax.keras_compat.compilation import Compilation
from tnt_jax.keras_compat.optimizers import LossScaleOptimizer
from tnt_jax.keras_compat.options import ModelOptions


def check_arguments(
    *,
    num_servers: Any,
    num_workers: Any,
    max_staleness: Any,
    backup_workers: Any,
    compression: Any,
    checkpoint_every: Any,
) -> None:
    """Raises a ValueError if an argument of `ParameterServer` is invalid."""
    least: dict[str, tuple[Any, int]] = {
        "num_servers": (num_servers, 1),
        "num_workers": (num_workers, 1),
        "backup_workers": (backup_workers, 0),
        "checkpoint_every": (checkpoint_every, 1),
        "max_staleness": (0 if max_staleness is None else max_staleness, 0),
    }
    for name, (value, smallest) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise ValueError(f"{name} must be an integer of at least {smallest}, but is {value!r}.")
    if backup_workers and max_staleness != 0:
        raise ValueError(
            "backup_workers are for synchronous training: pass max_staleness=0. Asynchronous "
            "training waits for no slow worker."
        )
    if backup_workers >= num_workers:
        raise ValueError(
            f"backup_workers ({backup_workers}) must be fewer than num_workers ({num_workers}): "
            "the others share each global batch."
        )
    if compression not in (None, "bfloat16"):
        raise ValueError(f"compression must be None or 'bfloat16', but is {compression!r}.")


def check_options(options: ModelOptions) -> None:
    """Raises a ValueError if the model has an option for sums over ranks."""
    for name, instead in (
        ("gradient_compression", "Pass compression='bfloat16' to ParameterServer instead."),
        ("shard_optimizer_state", "Servers divide the optimizer's state themselves."),
        ("mesh", "Servers divide the variables themselves."),
        ("reproducible", "Synchronous training adds the shares of a batch in a fixed order."),
    ):
        if getattr(options, name):
            raise ValueError(
                f"A model with {name} sums gradients over ranks, which a parameter server does not "
                f"do. {instead} Make the model without {name}."
            )


def check_compilation(compilation: Compilation) -> None:
    """Raises a ValueError if `compile` chose what servers and workers cannot do."""
    if compilation.accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={compilation.accumulation_steps} is not possible with a "
            "parameter server: use a larger batch, or synchronous training with more workers."
        )
    if compilation.on_nan is not None:
        raise ValueError(
            f"on_nan={compilation.on_nan!r} is not possible with a parameter server: other "
            "gradients are under way when a step is found not to be finite. Leave it out."
        )
    if isinstance(compilation.optimizer, LossScaleOptimizer):
        raise ValueError(
            "A LossScaleOptimizer is not possible with a parameter server: workers do not know the "
            "optimizer's state. Use bfloat16, which needs no scaling, instead of float16."
        )
