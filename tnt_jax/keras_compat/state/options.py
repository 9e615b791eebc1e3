"""The options of a `Model`, and how they choose its forward pass and its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tnt_jax import sharded
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.sums.reduction import choose_reduction
from tnt_jax.sharded import Pipeline, Remat, Rule, ShardingOptions
from tnt_jax.sharded.options import Axis
from tnt_jax.train.contracts import Apply
from tnt_jax.train.local.groups import LocalSteps
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.global_step import GlobalSteps

_OF_ADAPTER = ("precision", "trainable", "frozen", "synchronize_batch_norm")
# Without `ranks_per_host`, `mesh`, `sync` and the like, which belong to the machine.
_SAVED = """
    seed precision trainable frozen synchronize_batch_norm fusion_threshold gradient_compression
    shard_optimizer_state reproducible virtual_ranks
""".split()


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
    sync: LocalSteps | None = None

    def for_adapter(self) -> dict[str, Any]:
        """Returns the options of `tnt_jax.adapters.wrap`."""
        return {name: getattr(self, name) for name in _OF_ADAPTER}

    def check_local_steps(self) -> None:
        """Raises an error if `sync` is none, or another option excludes it."""
        if self.sync is None:
            return
        if not isinstance(self.sync, LocalSteps):
            raise TypeError(f"sync must be a tnt_jax.LocalSteps, but is {self.sync!r}.")
        refuse_with_local_steps(
            ("mesh", self.mesh is not None, "a group holds the whole model on each rank"),
            ("reproducible", self.reproducible, "results depend on the number of groups"),
            ("shard_optimizer_state", self.shard_optimizer_state, "no state is sharded in groups"),
            ("ranks_per_host", self.ranks_per_host > 1, "groups decide who sums with whom"),
            (
                "gradient_compression",
                self.gradient_compression is not None,
                "LocalSteps(compress='int8') compresses what travels between groups",
            ),
        )

    def saved(self) -> dict[str, Any]:
        """Returns the arguments for a saved or cloned model."""
        return {name: getattr(self, name) for name in _SAVED}

    def apply(self, apply: Apply) -> Apply:
        """Returns the forward pass in a pipeline, or with rematerialization, as options say."""
        if self.pipeline is not None:
            return sharded.pipelined(apply, self.pipeline, policy=self._layer_policy())
        return apply if self.remat == "none" else sharded.rematerialized_apply(apply, self.remat)

    def on_mesh(self, job: Runtime, sharding: ShardingOptions | None) -> Runtime:
        """Returns the job with the mesh of a model."""
        return job if sharding is None else replace(job, mesh=sharding.mesh.build(job.mesh))

    def steps(
        self,
        job: Runtime,
        sharding: ShardingOptions | None,
        names: Callable[[], Mapping[str, tuple[Axis, ...]]],
        *,
        whole: bool = False,
    ) -> DataParallelSteps | sharded.ShardedSteps:
        """Returns steps for parts of a batch, or `whole` ones; `names` are of dimensions."""
        if sharding is None and whole:
            return GlobalSteps(job)
        reduction = choose_reduction(
            job.platform,
            job.num_ranks,
            settings=job.settings,
            threshold_kb=self.fusion_threshold,
            compression=self.gradient_compression,
            ranks_per_host=self.ranks_per_host,
            shard_optimizer_state=self.shard_optimizer_state,
        )
        if sharding is None:
            return DataParallelSteps(job, reduction)
        make = sharded.ShardedGlobalSteps if whole else sharded.ShardedSteps
        return make(
            job,
            reduction,
            rules=sharding.rules,
            names=names,
            pipeline=self.pipeline,
            policy=self._layer_policy(),
            has_remat=self.remat != "none",
        )

    def _layer_policy(self) -> Any:
        """Returns what the layers of a pipeline keep for backpropagation; None for everything."""
        if self.pipeline is None or self.remat == "none":
            return None
        return sharded.policy_of(self.remat, self.pipeline.path)


def refuse_with_local_steps(*choices: tuple[str, bool, str]) -> None:
    """Raises a ValueError if a choice is made, by its name, that `LocalSteps` cannot go with."""
    for name, is_made, why in choices:
        if is_made:
            raise ValueError(
                f"sync=LocalSteps cannot be combined with {name}: {why}. Leave one of the two out."
            )
