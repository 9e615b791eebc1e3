"""Meshes over several processes: numbers of one device, and checkpoints in parts."""

import json

import numpy as np
import pytest
from processes import SCRIPTS, launch
from training import assert_close

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def train_in_processes(num_processes, mesh, epochs, directory, target, *, ruled=False):
    done = launch(
        num_processes, SCRIPTS / "train_sharded.py",
        json.dumps(mesh), epochs, directory, target, int(ruled),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return np.load(target)


def train_here(use_ranks, num_devices, mesh, epochs, directory="-"):
    from train_sharded import train

    use_ranks(num_devices)
    model, history, predicted = train(mesh, epochs, directory)
    return model.get_weights(), history, predicted


def weights_of(result):
    return [result[f"w{i}"] for i in range(4)]


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


def test_parts_of_two_processes_are_restored_on_another_mesh(use_ranks, tmp_path):
    weights, history, predicted = train_here(use_ranks, 1, None, 2)
    backup = tmp_path / "backup"
    first = train_in_processes(2, {"fsdp": 2}, 1, backup, tmp_path / "a.npz")
    np.testing.assert_allclose(first["loss"], history["loss"][:1], rtol=1e-5)
    assert first["share"] == 0.5
    last = train_here(use_ranks, 8, {"data": 2, "fsdp": 4}, 2, backup)
    # The history of the epoch before comes from the checkpoint.
    np.testing.assert_allclose(last[1]["loss"], history["loss"], rtol=1e-5)
    assert_close(last[0], weights)
    assert_close(last[2], predicted)


@pytest.mark.long  # The test above reads what two processes wrote.
def test_parts_are_restored_by_two_processes(use_ranks, tmp_path):
    weights, history, predicted = train_here(use_ranks, 1, None, 2)
    backup = tmp_path / "backup"
    train_here(use_ranks, 8, {"data": 2, "fsdp": 4}, 1, backup)
    last = train_in_processes(2, {"fsdp": 2}, 2, backup, tmp_path / "b.npz")
    np.testing.assert_allclose(last["loss"], history["loss"], rtol=1e-5)
    assert_close(weights_of(last), weights)
    assert_close(last["predicted"], predicted)


@pytest.mark.long  # Processes share rows; the test above has parts in several processes.
@pytest.mark.parametrize(
    ("num_processes", "mesh"),
    [(2, {"tensor": 2}), (4, {"data": 2, "fsdp": 2}), (4, {"fsdp": 2, "tensor": 2})],
)
def test_meshes_over_processes_equal_one_device(use_ranks, tmp_path, num_processes, mesh):
    weights, history, predicted = train_here(use_ranks, 1, None, 2)
    found = train_in_processes(
        num_processes, mesh, 2, "-", tmp_path / "a.npz", ruled="tensor" in mesh
    )
    np.testing.assert_allclose(found["loss"], history["loss"], rtol=1e-5)
    assert_close(weights_of(found), weights)
    assert_close(found["predicted"], predicted)


@pytest.mark.long
@pytest.mark.parametrize(("limit", "share"), [("10GB", -1), ("48kB", 0.5)])
def test_processes_choose_a_mesh_alike(use_ranks, monkeypatch, tmp_path, limit, share):
    weights, history, _ = train_here(use_ranks, 1, None, 1)
    monkeypatch.setenv("TNT_DEVICE_MEMORY", limit)
    directory = tmp_path / "backup" if share > 0 else "-"
    found = train_in_processes(2, "auto", 1, directory, tmp_path / "a.npz")
    np.testing.assert_allclose(found["loss"], history["loss"], rtol=1e-5)
    assert_close(weights_of(found), weights)
    assert found["share"] == share
