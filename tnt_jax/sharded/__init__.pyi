from .mesh_axes import MeshAxes as MeshAxes
from .options import ShardingOptions as ShardingOptions
from .rules import Rule as Rule
from .steps import ShardedSteps as ShardedSteps
