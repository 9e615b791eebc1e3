"""Damages files as disks do, and changes checkpoints as attackers do."""

import numpy as np

from tnt_jax.train.checkpoints.directory import FOLDER
from tnt_jax.train.checkpoints.files import damaged_files, write_file_checksums


def files_below(folder):
    """Returns the files below a folder, in a fixed order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip_bit(path, rng):
    """Inverts one random bit of a file; returns a function that inverts it again."""
    position, bit = int(rng.integers(path.stat().st_size)), 1 << int(rng.integers(8))

    def flip():
        data = bytearray(path.read_bytes())
        data[position] ^= bit
        path.write_bytes(data)

    flip()
    return flip


def random_flips(folder, *, count, seed):
    """Yields the file for each of `count` flipped bits, which are in every file in turn."""
    rng = np.random.default_rng(seed)
    files = [path for path in files_below(folder) if path.stat().st_size]
    for index in range(count):
        path = files[index % len(files)]
        restore = flip_bit(path, rng)
        yield path
        restore()


def rewrite_file_checksums(folder):
    """Makes a checkpoint valid again whose files have been changed, as an attacker can."""
    (folder / FOLDER / "files.json").unlink()
    write_file_checksums(folder)
    assert damaged_files(folder) == []
