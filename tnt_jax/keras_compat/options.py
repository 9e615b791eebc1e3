"""The options of a `Model`: one object with the constructor's arguments, for all parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tnt_jax.sharded import Pipeline, Remat, Rule, ShardingOptions


@dataclass(frozen=True)
class ModelOptions:
    """The arguments of `Model` except module and variables; see `Model`."""

    seed: int
    precision: str
    trainable: Sequence[str] | None
    frozen: Sequence[str]
    synchronize_batch_norm: bool
    fusion_threshold: int | Literal["xla"] | None
    gradient_compression: Literal["bfloat16"] | None
    ranks_per_host: int
    shard_optimizer_state: bool
    reproducible: bool
    virtual_ranks: int
    mesh: Mapping[str, int] | Literal["auto"] | None = None
    sharding_rules: Sequence[Rule] = ()
    pipeline: Pipeline | None = None
    remat: Remat | Mapping[str, Remat] = "none"

    def for_adapter(self) -> dict[str, Any]:
        """Returns the options of `tnt_jax.adapters.wrap`."""
        return self._named("precision", "trainable", "frozen", "synchronize_batch_norm")

    def for_reduction(self) -> dict[str, Any]:
        """Returns the options of `tnt_jax.distributed.reduction.choose_reduction`, by its names."""
        return {
            "threshold_kb": self.fusion_threshold, "compression": self.gradient_compression,
            "ranks_per_host": self.ranks_per_host,
            "shard_optimizer_state": self.shard_optimizer_state,
        }  # fmt: skip

    def for_sharding(self) -> ShardingOptions | None:
        """Returns how the model is sharded; None for data parallelism alone.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a value is invalid, or options exclude one another.
        """
        return ShardingOptions.of(
            self.mesh, self.sharding_rules, self.pipeline, reproducible=self.reproducible,
            gradient_compression=self.gradient_compression, ranks_per_host=self.ranks_per_host > 1,
            shard_optimizer_state=self.shard_optimizer_state,
        )  # fmt: skip

    def saved(self) -> dict[str, Any]:
        """Returns the arguments for a saved or cloned model.

        They exclude `ranks_per_host`, `mesh` and the like, which belong to the machine.
        """
        return self._named(
            "seed", "precision", "trainable", "frozen", "synchronize_batch_norm",
            "fusion_threshold", "gradient_compression",
            "shard_optimizer_state", "reproducible", "virtual_ranks",
        )  # fmt: skip

    def _named(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}
