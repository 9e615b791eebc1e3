"""A disk that is full, read-only or gone costs checkpoints, not the training."""

import contextlib
import shutil
import subprocess
from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest
from warned import kept_warnings

from tnt_jax.train.checkpoints.checkpoint import Checkpoints
from tnt_jax.train.state import create_state


def state_at(step):
    return replace(
        create_state({"w": jnp.full((256, 256), step)}, {}, optax.sgd(0.1), seed=0),
        step=jnp.int32(step),
    )


@contextlib.contextmanager
def small_disk(folder):
    """Mounts a file system of 1 MiB, which needs the right to do so."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    (folder / "fill").write_bytes(bytes(600_000))
    return (folder / "fill").unlink


def remove(folder):
    shutil.rmtree(folder / "run")
    return lambda: None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (fill, "No space left on device"),
        (remove, "run vanished"),
    ],
)
def test_training_goes_on_and_the_next_checkpoint_is_tried(tmp_path, fault, words):
    with small_disk(tmp_path / "disk") as disk, kept_warnings() as texts:
        checkpoints = Checkpoints(disk / "run")
        checkpoints.save(state_at(1))
        checkpoints.wait()
        end_fault = fault(disk)
        checkpoints.save(state_at(2))
        checkpoints.wait()
        assert len(texts) == 1
        assert words in texts[0]
        if fault is not remove:
            checkpoints.save(state_at(3))
            checkpoints.wait()
            assert len(texts) == 1
            assert Checkpoints(disk / "run").read_newest_valid().number == 1
        end_fault()
        checkpoints.save(state_at(4))
        checkpoints.close()
        assert Checkpoints(disk / "run").read_newest_valid().number == 4
        assert not list((disk / "run").glob("*tmp*"))


def test_a_full_disk_raises_if_asked_to(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        checkpoints = Checkpoints(disk / "run", on_save_error="raise")
        checkpoints.save(state_at(1))
        checkpoints.wait()
        empty = fill(disk)
        checkpoints.save(state_at(2))
        with pytest.raises(OSError, match="No space left on device"):
            checkpoints.wait()
        assert Checkpoints(disk / "run").read_newest_valid().number == 1
        empty()
        checkpoints.close()


def test_a_read_only_directory_is_tried_again(tmp_path):
    with small_disk(tmp_path / "disk") as disk, kept_warnings() as texts:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            Checkpoints(disk / "run", on_save_error="raise").save(state_at(1))
        checkpoints = Checkpoints(disk / "run")
        with pytest.raises(OSError, match=r"cannot be written to .*run: .*Read-only file system"):
            checkpoints.lock()
        assert [checkpoints.save(state_at(step)) for step in (1, 2)] == [None, None]
        assert len(texts) == 1
        assert "Read-only file system" in texts[0]
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert checkpoints.save(state_at(3)) == 3
        checkpoints.close()
