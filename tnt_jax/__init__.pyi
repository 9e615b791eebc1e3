from . import data as data
from . import models as models
from .collectives import all_gather as all_gather
from .collectives import all_reduce as all_reduce
from .collectives import broadcast as broadcast
from .keras_compat import callbacks as callbacks
from .keras_compat import losses as losses
from .keras_compat import metrics as metrics
from .keras_compat import optimizers as optimizers
from .keras_compat import schedules as schedules
from .keras_compat.model import Model as Model
from .runtime import barrier as barrier
from .runtime import get_master_rank as get_master_rank
from .runtime import get_process_count as get_process_count
from .runtime import get_process_index as get_process_index
from .runtime import get_rank as get_rank
from .runtime import get_size as get_size
from .runtime import init as init
from .runtime import is_master_rank as is_master_rank
from .runtime import shutdown as shutdown
from .seeding import set_seed as set_seed

__version__: str
