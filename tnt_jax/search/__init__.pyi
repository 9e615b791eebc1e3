from .studies import SharedTrial as SharedTrial
from .studies import optimize as optimize
