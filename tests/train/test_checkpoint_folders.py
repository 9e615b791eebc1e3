"""Saving and backups remove nothing that this library did not write."""

import json
import shutil

import flax.linen as nn
import numpy as np
import pytest
from crashes import Crash, CrashAt
from keras_beside import data

import tnt_jax as tnt
from tnt_jax import callbacks
from tnt_jax.train.checkpoints.checkpoint import Checkpoints
from tnt_jax.train.checkpoints.directory import OwnFolders, is_ours


def fit(folder=None, *, epochs=3, after=(), **model_options):
    """Trains a small model, with the callbacks that `after` makes for a folder."""
    model = tnt.Model(nn.Dense(3), **model_options)
    model.compile("sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(
        *data(), batch_size=8, epochs=epochs, verbose=0, callbacks=[make(folder) for make in after]
    )
    return model


def put_photos(folder, elsewhere):
    """Fills a directory with what a user may have in it, and returns what must be there
    afterwards.
    """
    names = [
        "0",
        "1",
        "2",
        "7",
        "0007",
        "photos",
        "tnt_jax_step_3",
        "tnt_jax_backup_1",
        "step_4",
        "tnt_jax_step_x",
    ]
    names += [
        "x.orbax-checkpoint-tmp",
        "3.orbax-checkpoint-tmp",
        "tnt_jax_step_2.orbax-checkpoint-tmp",
        "tnt_jax_step_06",
    ]
    for name in names:
        (folder / name / "state").mkdir(parents=True)
        (folder / name / "state" / "inner.jpg").write_text(name)
        (folder / name / "photo.jpg").write_text(name)
    (folder / "tnt_jax_step_5").write_text("a file")
    (folder / "tnt_jax_step_3" / "_CHECKPOINT_METADATA").write_text("not JSON")
    (folder / "tnt_jax_backup_1" / "_CHECKPOINT_METADATA").write_text(
        json.dumps({"custom_metadata": {"other": 1}})
    )
    # A complete checkpoint elsewhere, to which a link leads, and links to nowhere and to photos.
    shutil.copytree(fit_once(elsewhere), elsewhere / "kept")
    for kind in ("step", "backup"):
        (folder / f"tnt_jax_{kind}_8").symlink_to(elsewhere / "kept", target_is_directory=True)
        (folder / f"tnt_jax_{kind}_9").symlink_to(elsewhere / "nowhere")
        (folder / f"tnt_jax_{kind}_10.orbax-checkpoint-tmp").symlink_to(
            folder / "photos", target_is_directory=True
        )
    return contents(folder), contents(elsewhere)


def fit_once(elsewhere):
    checkpoints = Checkpoints(elsewhere / "saved")
    number = checkpoints.save(fit(epochs=1).state)
    checkpoints.close()
    return elsewhere / "saved" / f"tnt_jax_step_{number}"


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def is_kept(folder, before):
    after = contents(folder)
    return {name: after.get(name) for name in before} == before


ACTIONS = {
    "save": lambda folder: [fit().save(folder) for _ in range(3)],
    "save_weights": lambda folder: [fit().save_weights(folder) for _ in range(3)],
    "checkpoint": lambda folder: fit(folder, after=[callbacks.ModelCheckpoint]),
    "weights checkpoint": lambda folder: fit(
        folder, after=[lambda f: callbacks.ModelCheckpoint(f, save_weights_only=True)]
    ),
    "backup": lambda folder: fit(
        folder, after=[lambda f: callbacks.BackupAndRestore(f, save_freq=2)]
    ),
    "kept backup": lambda folder: fit(
        folder, after=[lambda f: callbacks.BackupAndRestore(f, delete_checkpoint=False)]
    ),
}


KEPT = {"checkpoint": 2, "weights checkpoint": 2, "backup": 0, "kept backup": 2}


@pytest.mark.parametrize("action", ACTIONS)
def test_what_the_user_has_in_the_directory_stays(tmp_path, action):
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    folder.mkdir()
    before, before_elsewhere = put_photos(folder, elsewhere)
    links = {path.name for path in folder.iterdir() if path.is_symlink()}
    ACTIONS[action](folder)
    assert is_kept(folder, before)
    assert is_kept(elsewhere, before_elsewhere)
    assert {path.name for path in folder.iterdir() if path.is_symlink()} == links
    own = [path.name for path in folder.iterdir() if is_ours(path)]
    assert len(own) == KEPT.get(action, 1), own
    if "save" in action:
        model = fit(epochs=1, seed=4)
        model.load_weights(folder)
        np.testing.assert_array_equal(model.get_weights()[0], fit().get_weights()[0])


def test_a_directory_of_numbers_is_no_checkpoint(tmp_path):
    (tmp_path / "3" / "state").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint"):
        tnt.models.load_model(tmp_path)
    assert (tmp_path / "3" / "state").is_dir()


def test_models_and_backups_in_one_directory_do_not_remove_each_other(tmp_path):
    both = [callbacks.ModelCheckpoint, callbacks.BackupAndRestore]
    with pytest.raises(Crash):
        fit(tmp_path, after=[*both, lambda _: CrashAt(12)])
    assert {path.name.rpartition("_")[0] for path in tmp_path.glob("tnt_jax*")} == {
        "tnt_jax_backup",
        "tnt_jax_step",
    }
    model = fit(tmp_path, after=both)
    last = model.optimizer.iterations
    assert {path.name for path in tmp_path.iterdir()} == {
        f"tnt_jax_step_{last - 5}",
        f"tnt_jax_step_{last}",
    }
    np.testing.assert_array_equal(
        tnt.models.load_model(tmp_path).get_weights()[0], model.get_weights()[0]
    )


@pytest.mark.parametrize(
    ("entries", "goes"),
    [
        ([], True),
        (["_CHECKPOINT_METADATA", "state.orbax-checkpoint-tmp", "about"], True),
        (["state", "photo.jpg"], False),
    ],
)
def test_only_unfinished_checkpoints_of_ours_are_cleaned(tmp_path, entries, goes):
    left = tmp_path / "tnt_jax_step_3.orbax-checkpoint-tmp-17"
    for entry in entries:
        (left / entry).mkdir(parents=True)
    left.mkdir(exist_ok=True)
    OwnFolders(tmp_path, "tnt_jax_backup").remove_unfinished()
    assert left.is_dir()
    OwnFolders(tmp_path, "tnt_jax_step").remove_unfinished()
    assert left.is_dir() is not goes


def test_loading_removes_nothing(tmp_path):
    fit().save(tmp_path)
    left = tmp_path / "tnt_jax_step_3.orbax-checkpoint-tmp"
    left.mkdir()
    tnt.models.load_model(tmp_path)
    assert left.is_dir()
