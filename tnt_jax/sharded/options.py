"""How a model is sharded, as its user chose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tnt_jax import _jax
from tnt_jax.sharded.mesh_axes import AUTO, MeshAxes
from tnt_jax.sharded.pipeline.pipeline import Pipeline
from tnt_jax.sharded.rules import Rule, checked_rules


@dataclass(frozen=True)
class ShardingOptions:
    """A user's choices, checked; `is_open` if training is to choose a mesh for this one."""

    mesh: MeshAxes
    rules: tuple[Rule, ...] = ()
    pipeline: Pipeline | None = None
    is_open: bool = False

    @classmethod
    def of(
        cls,
        mesh: Mapping[str, int] | Literal["auto"] | None,
        rules: Sequence[Rule],
        pipeline: Pipeline | None = None,
        **others: Any,
    ) -> "ShardingOptions | None":
        """Returns the choices, or None if the model is not sharded.

        The mesh may be `"auto"`, to choose it by the memory of a step, or None, for data
        parallelism alone. Others are options that exclude a mesh; those that are set count. A
        TypeError says that an argument is of the wrong kind, a ValueError that a value is invalid,
        or that choices exclude one another.
        """
        if mesh is None:
            if rules:
                raise ValueError(
                    "sharding_rules need a mesh with the axes that they name, such as "
                    "mesh={'data': 4, 'tensor': 2}."
                )
            if pipeline is not None:
                raise ValueError(
                    "A pipeline needs a mesh with an axis 'stage', such as mesh={'data': 2, "
                    "'stage': 4}."
                )
            return None
        is_open = mesh == AUTO
        if is_open and pipeline is not None:
            raise ValueError(
                'mesh="auto" chooses between data parallelism and parts, not stages of a pipeline. '
                "Give the mesh of a pipeline, such as mesh={'data': 2, 'stage': 4}."
            )
        axes = MeshAxes(fsdp=-1) if is_open else MeshAxes.of(mesh)
        _check_stages(mesh, axes, pipeline)
        chosen = [name for name, value in others.items() if value]
        if chosen:
            raise ValueError(
                f"{chosen[0]} cannot be combined with mesh: {_WAYS_OUT[chosen[0]]}. Leave one of "
                "the two out."
            )
        return cls(axes, checked_rules(rules), pipeline, is_open)


def _check_stages(mesh: Any, axes: MeshAxes, pipeline: Any) -> None:
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise TypeError(
            "pipeline must be a tnt_jax.Pipeline, such as Pipeline('layers', microbatches=16), but "
            f"is {pipeline!r}."
        )
    if pipeline is not None and _jax.STAGE_AXIS not in mesh:
        raise ValueError(
            f"A pipeline is divided over the axis 'stage', which mesh={dict(mesh)} lacks. Add it, "
            "such as mesh={'data': 2, 'stage': 4}, or leave pipeline out."
        )
    if pipeline is None and axes.stage != 1:
        raise ValueError(
            f"The axis 'stage' of mesh ({axes.stage} devices) needs a pipeline: "
            "pipeline=tnt_jax.Pipeline('layers', microbatches=16)."
        )


_WAYS_OUT = {
    "reproducible": "its fixed order of additions is that of whole gradients",
    "gradient_compression": "parts of gradients are scattered, not summed on every rank",
    "ranks_per_host": "sums over hosts are those of whole gradients",
    "shard_optimizer_state": "with an axis 'fsdp' the optimizer state is sharded already",
}
