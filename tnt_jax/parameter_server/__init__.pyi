from .facade import ParameterServer as ParameterServer
from .partition import FixedShardsPartitioner as FixedShardsPartitioner
from .partition import MaxSizePartitioner as MaxSizePartitioner
from .partition import MinSizePartitioner as MinSizePartitioner
from .scheduling import RemoteValue as RemoteValue
from .sidecar import SidecarEvaluation as SidecarEvaluation
from .staleness import Statistics as Statistics
