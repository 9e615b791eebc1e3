from .steps import ReproducibleSteps as ReproducibleSteps
from .virtual_ranks import VirtualRanks as VirtualRanks
from .virtual_ranks import check_reproducible as check_reproducible
