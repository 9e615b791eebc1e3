from .options import check_reproducible as check_reproducible
from .steps import ReproducibleSteps as ReproducibleSteps
from .virtual_ranks import VirtualRanks as VirtualRanks
