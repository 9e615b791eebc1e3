from .applying import RemoteValue as RemoteValue
from .coordinator import SidecarEvaluation as SidecarEvaluation
from .facade import ParameterServer as ParameterServer
from .partition import FixedShardsPartitioner as FixedShardsPartitioner
from .partition import MaxSizePartitioner as MaxSizePartitioner
from .partition import MinSizePartitioner as MinSizePartitioner
from .server_group import Statistics as Statistics
