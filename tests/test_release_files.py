"""Every file that a release has written is read: each number is that of its time, and training goes
on from it.
"""

import csv
import json
import shutil

import numpy as np
import pytest
import release_files

import tnt_jax as tnt
from tnt_jax import callbacks
from tnt_jax.distributed.goodput import AccountFile
from tnt_jax.launch.planning.fingerprint import first_difference
from tnt_jax.launch.scale.scaling import Scaling

RELEASES = sorted(path.name for path in release_files.FOLDER.iterdir())


@pytest.fixture(params=RELEASES)
def folder(request, tmp_path, use_ranks):
    """Copies the files of a release, to which tests write."""
    use_ranks(2)
    return shutil.copytree(release_files.FOLDER / request.param, tmp_path / "kept")


def assert_weights(model, folder, name, **tolerance):
    expected = np.load(folder / "expected.npz")
    weights = [expected[key] for key in expected if key.startswith(f"{name}/")]
    assert len(weights) > 2
    for mine, theirs in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(mine, theirs, **{"rtol": 0, **tolerance})


def test_this_release_has_files():
    assert tnt.__version__ in RELEASES


@pytest.mark.parametrize(
    ("kind", "ending"),
    [(kind, ending) for kind, endings in release_files.ENDINGS.items() for ending in endings],
)
def test_models_and_weights_are_read_and_train_on(folder, kind, ending):
    path = folder / f"{kind}{ending}"
    if ending in release_files.HAS_MODEL:
        model = tnt.models.load_model(path)
    else:
        model = release_files.make_model(kind)
        model.build(release_files.X)
        model.load_weights(path)
    assert_weights(model, folder, kind)
    if ending != ".safetensors":  # It has no state of the optimizer.
        release_files.fit(model, 3, initial_epoch=2)
        assert_weights(model, folder, f"{kind}_after", rtol=1e-4, atol=1e-6)


def test_a_backup_is_resumed(folder):
    model = release_files.make_model("flax")
    log = callbacks.CSVLogger(folder / "log.csv", append=True)
    backup = callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    release_files.fit(model, 3, callbacks=[backup, log])
    assert_weights(model, folder, "flax_after", rtol=1e-4, atol=1e-6)
    rows = list(csv.DictReader((folder / "log.csv").open()))
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]
    assert all(float(row["loss"]) > 0 for row in rows)


def test_a_loop_is_resumed(folder):
    dataset = tnt.distribute(release_files.X, batch_size=8)
    checkpoints = tnt.LoopCheckpoints(folder / "loop")
    empty = {"params": {"w": np.zeros(3, np.float32)}, "count": np.int32(0)}
    state = checkpoints.restore(empty, dataset)
    np.testing.assert_array_equal(state["params"]["w"], release_files.LOOP_STATE["params"]["w"])
    assert int(state["count"]) == 7
    assert checkpoints.notes == {"best": 0.25}
    assert dataset.position["batch"] == 1


def test_records_are_read(folder, tmp_path):
    release_files.fit(
        release_files.make_model("flax"), 2, callbacks=[callbacks.Fingerprint(tmp_path / "digests")]
    )
    assert first_difference(folder / "digests", folder / "digests") is None
    # Digests depend on the version of the compiler, the names of arrays do not.
    assert names_of_arrays(folder / "digests") == names_of_arrays(tmp_path / "digests")
    assert AccountFile(folder / "goodput.jsonl").earlier["step"] == 6
    kept = Scaling.from_json((folder / "scaling.json").read_text())
    assert [point.efficiency for point in kept.points] == [
        point.efficiency for point in release_files.scaling().points
    ]


def names_of_arrays(file):
    return [list(json.loads(line)["arrays"]) for line in file.read_text().splitlines()]
