"""What the calls of a model share."""

from dataclasses import dataclass

from tnt_jax.keras_compat.fit.data_intake import DataIntake
from tnt_jax.keras_compat.fit.hooks import Progress
from tnt_jax.keras_compat.fit.preparation import Preparation
from tnt_jax.keras_compat.fit.resume import Resumption
from tnt_jax.keras_compat.state.building import Builder
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.model_state import ModelState


@dataclass(frozen=True)
class Shared:
    """What `fit`, `evaluate`, `predict` and the calls for single batches share."""

    core: Core
    state: ModelState
    builder: Builder
    intake: DataIntake
    preparation: Preparation
    progress: Progress
    resumption: Resumption

    @classmethod
    def of(cls, core: Core) -> "Shared":
        """Returns them for a model."""
        builder, state, progress = Builder(core), ModelState(core), Progress()
        return cls(
            core,
            state,
            builder,
            DataIntake(core, builder),
            Preparation(core, state, builder),
            progress,
            Resumption(core, progress),
        )
