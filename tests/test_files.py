"""Writing and reading files in folders that others can write to."""

import os
import stat
from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.files import irregular_entries, read_regular, replacing


def test_a_file_changes_only_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with replacing(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
        assert temporary.name == path.name
        assert stat.S_IMODE(temporary.parent.stat().st_mode) == 0o700
    with pytest.raises(IsADirectoryError), replacing(path) as temporary:
        temporary.mkdir()
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["file.txt"]


def test_the_mode_of_a_file_is_that_of_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        with replacing(tmp_path / "file") as temporary:
            temporary.write_text("text")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["x.keras", "x.weights.h5", "x.safetensors"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_weights_are_not_written_through_a_planted_link(tmp_path, name, link):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o777)
    # Every name that a process could derive from its id and the name of the file, and the file.
    names = [
        f".{os.getpid()}-{name}",
        f"{name}.{os.getpid()}",
        f"{name}.extra",
        f"{name}.tmp",
        name,
    ]
    for planted in names:
        link(victim, folder / planted)
    model = tnt.Model(nn.Dense(2))
    model.build((None, 3))
    model.save_weights(folder / name) if name != "x.keras" else model.save(folder / name)
    assert victim.read_text() == "precious"
    assert not (folder / name).is_symlink()
    loaded = tnt.Model(nn.Dense(2))
    loaded.build((None, 3))
    loaded.load_weights(folder / name)
    np.testing.assert_array_equal(loaded.get_weights()[1], model.get_weights()[1])


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_irregular_files_are_not_read(tmp_path, kind):
    path = tmp_path / "a" / "file"
    path.parent.mkdir()
    plant(path, kind)
    with pytest.raises(OSError, match=r"is not a regular file|Too many levels of symbolic links"):
        read_regular(path)
    assert irregular_entries(tmp_path) == ["a/file"]


def test_a_link_to_a_folder_is_irregular_and_not_followed(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path)
    (tmp_path / "b").write_text("text")
    assert irregular_entries(tmp_path) == ["a"]
    assert read_regular(tmp_path / "b") == b"text"


def plant(path: Path, kind: str):
    """Puts something at a path that is no regular file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(__file__)
    else:
        path.symlink_to("/dev/zero")
