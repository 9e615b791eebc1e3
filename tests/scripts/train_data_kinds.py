"""Trains on every kind of data and writes the numbers of each process: `train_data_kinds.py
FOLDER`.
"""

import sys
from pathlib import Path

# Workers of a DataLoader import this file, and shall not import what the kinds of data need.
if __name__ == "__main__":
    import numpy as np

    import tnt_jax as tnt

    tnt.init()
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    import data_kinds

    flat = {
        f"{kind}|{name}": value
        for kind, numbers in data_kinds.results(sys.argv[1]).items()
        for name, value in numbers.items()
    }
    np.savez(Path(sys.argv[1]) / f"{tnt.get_process_index()}.npz", **flat)
