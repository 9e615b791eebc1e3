"""How a model is sharded, as its user chose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tnt_jax.sharded.mesh_axes import MeshAxes
from tnt_jax.sharded.rules import Rule, checked_rules


@dataclass(frozen=True)
class ShardingOptions:
    """The choices of a user, checked.

    Attributes:
        mesh: Devices along each axis.
        rules: Rules that say which dimension is cut over which axis.
    """

    mesh: MeshAxes
    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(
        cls, mesh: Mapping[str, int] | None, rules: Sequence[Rule], **others: Any
    ) -> "ShardingOptions | None":
        """Returns the choices, or None if the model is not sharded.

        Args:
            mesh: Devices along each axis; None for data parallelism alone.
            rules: Sharding rules.
            **others: Options that exclude a mesh, by name; those that are set count.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a value is invalid, or the choices exclude one another.
        """
        if mesh is None:
            if rules:
                raise ValueError(
                    "sharding_rules need a mesh with the axes that they name, such as "
                    "mesh={'data': 4, 'tensor': 2}."
                )
            return None
        axes = MeshAxes.of(mesh)
        if axes.stage != 1:
            raise ValueError(
                f"The axis 'stage' of mesh ({axes.stage} devices) needs a model that is divided "
                "into stages, which is not offered. Use 'fsdp' instead: it divides every layer."
            )
        chosen = [name for name, value in others.items() if value]
        if chosen:
            raise ValueError(
                f"{chosen[0]} cannot be combined with mesh: {_WAYS_OUT[chosen[0]]}. Leave one of "
                "the two out."
            )
        return cls(axes, checked_rules(rules))


_WAYS_OUT = {
    "reproducible": "its fixed order of additions is that of whole gradients",
    "gradient_compression": "parts of gradients are scattered, not summed on every rank",
    "ranks_per_host": "sums over hosts are those of whole gradients",
    "shard_optimizer_state": "with an axis 'fsdp' the optimizer state is sharded already",
}
