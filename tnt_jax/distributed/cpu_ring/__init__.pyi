from .reducer import connect as connect
from .reducer import sum_in_background as sum_in_background
