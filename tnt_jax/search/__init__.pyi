from .shared_trial import SharedTrial as SharedTrial
from .studies import optimize as optimize
