"""Temporary folders of processes that are killed, and of processes that live."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tnt_jax.on_ray.storage import Claim, remove_unclaimed

CLAIMS = """
import sys, pathlib
from tnt_jax.on_ray.storage import Claim
claim = Claim(pathlib.Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Has temporary folders made in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_stays_while_its_process_lives_and_not_longer(folders):
    folder = folders / "mine-1"
    command = [sys.executable, "-c", CLAIMS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"claimed\n"
        (folder / "checkpoint").write_text("of a run")
        remove_unclaimed("mine-")
        assert (folder / "checkpoint").exists()
        process.kill()
    remove_unclaimed("mine-")
    assert not folder.exists()


def test_only_claimed_folders_of_that_name_are_removed(folders):
    (folders / "mine-of-somebody").mkdir()
    claims = [Claim(folders / name) for name in ("mine-1", "other-1")]
    for claim in claims:
        os.close(claim._descriptor)
    remove_unclaimed("mine-")
    assert sorted(path.name for path in Path(folders).iterdir()) == ["mine-of-somebody", "other-1"]


def test_a_claim_removes_its_folder(folders):
    claim = Claim(folders / "mine-1")
    (folders / "mine-1" / "checkpoint").mkdir()
    claim.remove()
    assert not list(folders.iterdir())


def test_a_folder_that_others_can_write_to_is_not_claimed(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("shared", "link"):
        with pytest.raises(OSError, match="is no directory that this user alone can write to"):
            Claim(tmp_path / name)
