"""Checkpoints that are damaged are noticed and named, and the one before is used."""

import json
import os
import re
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from damage import files_below, random_flips
from warned import kept_warnings

from tnt_jax.train.checkpoints.checkpoint import Checkpoints, Position
from tnt_jax.train.checkpoints.files import DamagedCheckpointError, _checksum_of_list
from tnt_jax.train.state import create_state, state_arrays


@pytest.fixture
def warnings():
    """Returns the list of warnings so far."""
    with kept_warnings() as texts:
        yield texts


def state_at(step, *, value=1.0):
    params = {"a": {"kernel": jnp.full((16, 8), value)}, "b": jnp.arange(5, dtype=jnp.bfloat16)}
    state = create_state(params, {"mean": jnp.ones(3)}, optax.adam(0.1), seed=0)
    return replace(state, step=jnp.int32(step))


def save(folder, *steps, **options):
    """Saves a checkpoint at each step; returns the folder of the last."""
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(
            state_at(step, value=float(step)),
            position=Position(step, 3),
            extra={"sums/0": np.float64(step)},
            notes={"callbacks": [["History", {"loss": [0.25, 1.5]}]]},
        )
    checkpoints.close()
    return folder / f"tnt_jax_step_{steps[-1]}"


def is_what_was_saved(saved, step):
    expected = state_arrays(state_at(step, value=float(step)))
    return (
        saved.number == step
        and saved.position == Position(step, 3)
        and saved.notes == {"callbacks": [["History", {"loss": [0.25, 1.5]}]]}
        and saved.extra == {"sums/0": np.float64(step)}
        and saved.arrays.keys() == expected.keys()
        and all(
            leaf.dtype == expected[path].dtype
            and leaf.tobytes() == np.asarray(expected[path]).tobytes()
            for path, leaf in saved.arrays.items()
        )
    )


def purge(folder):
    """Deletes all files below a folder, and leaves the folders."""
    for path in files_below(folder):
        path.unlink()


def delete_what_describes(folder):
    for path in [folder / "_CHECKPOINT_METADATA", *(folder / "checksums").iterdir()]:
        path.unlink()


def leave_an_empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


LOSSES = [purge, delete_what_describes, leave_an_empty_folder]


@pytest.mark.parametrize("lose", LOSSES)
def test_folders_without_their_files_are_an_error_not_a_fresh_start(tmp_path, lose):
    newest = save(tmp_path, 1, 2)
    for folder in tmp_path.glob("tnt_jax_step_*"):
        lose(folder)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        DamagedCheckpointError, match=f"No checkpoint in .*{newest} (has lost|is dam)"
    ):
        Checkpoints(tmp_path).read_newest_valid()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("lose", LOSSES)
def test_the_one_before_a_folder_without_its_files_is_used_with_a_warning(tmp_path, lose, warnings):
    newest = save(tmp_path, 1, 2)
    lose(newest)
    checkpoints = Checkpoints(tmp_path)
    assert is_what_was_saved(checkpoints.read_newest_valid(), 1)
    assert len(warnings) == 1
    assert str(newest) in warnings[0]
    # The next checkpoint takes its place.
    checkpoints.save(state_at(1))
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tnt_jax_step_1", "tnt_jax_step_3"]


def test_a_directory_without_any_checkpoint_starts_fresh(tmp_path):
    unfinished = tmp_path / "tnt_jax_step_1.orbax-checkpoint-tmp"
    for folder in (tmp_path / "missing", tmp_path):
        assert Checkpoints(folder).read_newest_valid() is None
    unfinished.mkdir()
    assert Checkpoints(tmp_path).read_newest_valid() is None


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_a_flipped_bit_is_harmless_or_named_and_the_one_before_is_used(tmp_path, warnings, count):
    newest = save(tmp_path, 1, 2)
    detected = 0
    for path in random_flips(newest, count=count, seed=17):
        before = len(warnings)
        saved = Checkpoints(tmp_path).read_newest_valid()
        told = warnings[before:]
        name = str(path.relative_to(newest))
        if told:
            detected += 1
            assert is_what_was_saved(saved, 1)
            assert len(told) == 1
            assert f"{newest} is damaged: {name}" in told[0] or "checksums/files.json" in told[0]
            assert "Checkpoint 1 is used instead." in told[0]
        else:
            assert is_what_was_saved(saved, 2), name
    assert detected == count
    assert is_what_was_saved(Checkpoints(tmp_path).read_newest_valid(), 2)


@pytest.mark.parametrize("damage", ["delete", "truncate", "empty"])
def test_a_deleted_or_truncated_file_is_named(tmp_path, warnings, damage):
    newest = save(tmp_path, 1, 2)
    for path in files_below(newest):
        data = path.read_bytes()
        if damage == "delete":
            path.unlink()
        else:
            path.write_bytes(data[: len(data) // 2] if damage == "truncate" else b"")
        saved = Checkpoints(tmp_path).read_newest_valid()
        path.write_bytes(data)
        assert is_what_was_saved(saved, 1)
        size = 0 if damage == "empty" else len(data) // 2
        problem = "is missing" if damage == "delete" else f"has {size} bytes instead of {len(data)}"
        # The list of the files is read, and not compared with itself.
        is_list = path.name == "files.json"
        assert f"{path.relative_to(newest)} {'' if is_list else problem}" in warnings[-1]


def test_damaged_arrays_are_named(tmp_path):
    newest = save(tmp_path, 2)
    values = np.full((16, 8), 2.0, np.float32).tobytes()
    # Arrays may lie in several files.
    [data] = [x for x in files_below(newest / "state") if values in x.read_bytes()]
    content = data.read_bytes()
    assert content.count(values) == 1
    data.write_bytes(content.replace(values, bytes(len(values))))
    with pytest.raises(
        DamagedCheckpointError,
        match=rf"{re.escape(str(data.relative_to(newest)))} has changed; "
        "state/params/a/kernel has other values than were saved$",
    ):
        Checkpoints(tmp_path).read(2)


def test_without_a_valid_checkpoint_training_does_not_start_anew(tmp_path):
    save(tmp_path, 1, 2)
    for number in (1, 2):
        shutil.rmtree(tmp_path / f"tnt_jax_step_{number}" / "state")
    with pytest.raises(OSError, match=r"No checkpoint in .* can be read.*_step_2.*_step_1"):
        Checkpoints(tmp_path).read_newest_valid()
    assert Checkpoints(tmp_path / "nothing").read_newest_valid() is None


def test_damaged_checkpoints_do_not_count_among_those_that_stay(tmp_path):
    newest = save(tmp_path, 1, 2)
    (newest / "about" / "metadata").unlink()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.read_newest_valid().number == 1
    checkpoints.save(state_at(3))
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tnt_jax_step_1",
        "tnt_jax_step_3",
    ]


def test_two_checkpoints_and_the_best_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 8):
        checkpoints.save(state_at(step), is_best=step in (2, 3))
    checkpoints.close()
    assert [number for number, _ in checkpoints._folders.complete()] == [3, 6, 7]


def test_a_state_that_is_not_finite_is_refused_once(tmp_path, warnings):
    save(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, max_to_keep=1)
    for step, value in ((2, np.nan), (3, np.inf), (4, np.nan)):
        checkpoints.save(state_at(step, value=value))
    checkpoints.wait()
    assert [path.name for path in tmp_path.glob("tnt_jax*")] == ["tnt_jax_step_1"]
    assert len(warnings) == 1
    assert "params/a/kernel holds NaN or infinity" in warnings[0]
    checkpoints.save(state_at(5))
    checkpoints.close()
    assert Checkpoints(tmp_path).newest() == 5


@pytest.mark.parametrize("name", ["checksums", "checksums/files.json", "checksums/arrays_0.json"])
def test_a_checkpoint_without_checksums_is_damaged(tmp_path, warnings, name):
    newest = save(tmp_path, 1, 2)
    gone = newest / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert is_what_was_saved(Checkpoints(tmp_path).read_newest_valid(), 1)
    assert f"{newest} is damaged: checksums/" in warnings[-1]


def test_orbax_reads_what_is_written(tmp_path):
    newest = save(tmp_path, 3)
    restored = state_arrays(ocp.PyTreeCheckpointer().restore(newest / "state"))
    expected = state_arrays(state_at(3, value=3.0))
    assert restored.keys() == expected.keys()
    for path, leaf in restored.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected[path]))


@pytest.mark.parametrize("name", ["/dev/zero", "../../outside", "state/../../../outside", "pipe"])
def test_checksums_name_files_of_the_checkpoint_alone(tmp_path, warnings, name):
    (tmp_path / "outside").write_bytes(b"secret")
    newest = save(tmp_path / "run", 1, 2)
    listed = newest / "checksums" / "files.json"
    files = json.loads(listed.read_bytes())["files"] | {
        name.replace("pipe", str(newest / "pipe")): [6, 1]
    }
    listed.write_text(json.dumps({"crc32": _checksum_of_list(files), "files": files}))
    if name == "pipe":
        os.mkfifo(newest / "pipe")
    assert is_what_was_saved(Checkpoints(tmp_path / "run").read_newest_valid(), 1)
    expected = "pipe in it must be regular files" if name == "pipe" else f"{name} is missing"
    assert expected in warnings[-1]


@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "outside"])
def test_entries_that_lead_out_of_a_checkpoint_are_refused(tmp_path, warnings, target):
    folder = save(tmp_path / "run", 1, 2)
    names = [str(path.relative_to(folder)) for path in files_below(folder)]
    for name in [*names, "state", "checksums"]:
        path, kept = folder / name, tmp_path / "outside"
        path.rename(kept)
        if target == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(kept if target == "outside" else target)
        saved = Checkpoints(tmp_path / "run").read_newest_valid()
        assert is_what_was_saved(saved, 1), name
        assert f"{name} in it must be regular" in warnings[-1]
        path.unlink()
        kept.rename(path)
