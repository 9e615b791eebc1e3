"""The choices of `compile`, and what was made from them since."""

from dataclasses import dataclass, field, fields
from typing import Any, get_args

import optax

from tnt_jax.keras_compat.compiling.compiled import CompileArguments, Compiled
from tnt_jax.keras_compat.compiling.keras_training import check_training_methods, choose_optimizer
from tnt_jax.keras_compat.compiling.objective import CompiledObjective
from tnt_jax.keras_compat.optimizers import Optimizer
from tnt_jax.log import logger
from tnt_jax.train.finite import OnNaN


@dataclass
class Compilation:
    """The choices of one call of `compile`; the next call creates a new one."""

    given: dict[str, Any]
    arguments: CompileArguments
    optimizer: Optimizer
    steps_per_execution: int | None  # None until "auto" has timed them.
    on_nan: OnNaN | None  # Reaction to a step that is not finite; None to take it.
    transformation: optax.GradientTransformation | None = None
    functions: Compiled | CompiledObjective | None = None  # None before the first batch.
    # The kind of data that `functions` were made for, until data of that kind was checked.
    announced_kind: Any = None
    # Training (True) or evaluation: whose program was traced for how rows depend on one another,
    # and of which that is known.
    traced_rows: set[bool] = field(default_factory=set)
    checked_rows: set[bool] = field(default_factory=set)
    dependence: str | None = None
    # Kinds of data that were checked against the losses, and shapes that training has seen.
    known_kinds: set[Any] = field(default_factory=set)
    compiled_kinds: set[Any] = field(default_factory=set)

    def forget_data(self) -> None:
        """Lets the next call check its data and compile its steps anew."""
        self.functions = self.announced_kind = self.dependence = None
        self.traced_rows, self.checked_rows = set(), set()
        self.known_kinds, self.compiled_kinds = set(), set()

    @property
    def accumulation_steps(self) -> int:
        """Steps whose mean gradient makes one update."""
        return self.optimizer.gradient_accumulation_steps or 1


def new_compilation(
    module: Any, *, run_eagerly: bool, jit_compile: Any, **given: Any
) -> Compilation:
    """Returns the compilation of a module with the arguments of `compile`."""
    arguments = CompileArguments(
        **{field.name: given[field.name] for field in fields(CompileArguments)}
    )
    if arguments.objective is None:
        check_training_methods(module)
    elif any(value is not None for name, value in vars(arguments).items() if name != "objective"):
        raise ValueError(
            "An objective takes the place of a loss and returns its own metrics: leave loss, "
            "loss_weights, metrics and weighted_metrics out."
        )
    steps, on_nan = given["steps_per_execution"], given["on_nan"]
    _check_options(run_eagerly, steps, jit_compile, on_nan)
    optimizer = choose_optimizer(
        given["optimizer"], module, auto_scale_loss=given["auto_scale_loss"]
    )
    arguments.check_names()
    return Compilation(given, arguments, optimizer, None if steps == "auto" else steps, on_nan)


def _check_options(
    run_eagerly: Any, steps_per_execution: Any, jit_compile: Any, on_nan: Any
) -> None:
    if run_eagerly:
        raise ValueError(
            "run_eagerly=True is not possible: a step is one compiled program. Wrap fit in "
            "jax.disable_jit() to debug."
        )
    is_number = isinstance(steps_per_execution, int) and steps_per_execution >= 1
    if not is_number and steps_per_execution != "auto":
        raise ValueError(
            f"steps_per_execution must be at least 1 or 'auto', but is {steps_per_execution!r}."
        )
    if on_nan not in (None, *get_args(OnNaN)):
        raise ValueError(f"on_nan must be None, 'raise', 'skip' or 'rollback', but is {on_nan!r}.")
    if jit_compile not in (True, False, "auto"):
        raise ValueError(f"jit_compile must be True, False or 'auto', but is {jit_compile!r}.")
    if jit_compile is False:
        logger.warning("jit_compile=False has no effect: steps are always compiled.")
