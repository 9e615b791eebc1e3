"""Runs in experiment trackers, by their own packages without a network."""

import json
import struct
import zipfile

import pytest
from crashes import Crash, CrashAt
from keras_beside import Net
from saved_runs import fit

import tnt_jax as tnt
from tnt_jax import callbacks


class Recorded:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.started, self.logged, self.arrays, self.num_finished = [], [], [], 0

    def start(self, configuration, run):
        self.started.append((configuration, run))
        return run or f"run {len(self.started)}"

    def log(self, values, step):
        self.logged.append((step, dict(values)))

    def log_arrays(self, kind, arrays, step):
        self.arrays.append((kind, sorted(arrays), step))

    def finish(self):
        self.num_finished += 1


def make_model(**options):
    model = tnt.Model(Net())
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.SGD(0.05, momentum=0.9), loss, **options)
    return model


@pytest.fixture(autouse=True)
def ranks(use_ranks):
    use_ranks(2)


def test_a_tracker_gets_the_logs_of_the_history_and_what_defines_the_run():
    tracker, model = Recorded(), make_model()
    history = fit(model, callbacks=[callbacks.Track(tracker)], epochs=3).history
    per_epoch = int(model.state.step) // 3
    assert [step for step, _ in tracker.logged] == [per_epoch * n for n in (1, 2, 3)]
    for epoch, (_, values) in enumerate(tracker.logged):
        assert values.pop("epoch") == epoch
        assert values.pop("learning_rate") == pytest.approx(0.05)
        assert values == {name: pytest.approx(logs[epoch]) for name, logs in history.items()}
    ((configuration, run),) = tracker.started
    assert run is None
    assert configuration["optimizer"]["optimizer.momentum"] == "0.9"
    assert configuration["batch_size"]["rows of a global batch"] == "8"
    assert {"model", "loss", "data", "seed", "versions"} < configuration.keys()
    assert tracker.num_finished == 1


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_logs_of_steps_have_their_numbers(steps_per_execution):
    tracker, model = Recorded(), make_model(steps_per_execution=steps_per_execution)
    fit(model, callbacks=[callbacks.Track(tracker, update_freq=2)], epochs=2)
    last = int(model.state.step)
    steps = [step for step, values in tracker.logged if "batch_loss" in values]
    assert steps[-1] <= last
    assert {step // 2 for step in steps} == set(range(1, last // 2 + 1))


def test_weights_come_as_histograms_and_images():
    tracker = Recorded()
    track = callbacks.Track(tracker, histogram_freq=2, write_images=True)
    fit(make_model(), callbacks=[track], epochs=3)
    (kind, names, step), (other, images, _), *rest = tracker.arrays
    assert (kind, other, len(rest)) == ("histogram", "image", 2)
    assert "Dense_0/kernel" in names
    assert "Dense_0/kernel" in images
    assert step == tracker.logged[0][0]


def resumed(tmp_path, make_tracker):
    """Runs a training that is interrupted in its second epoch and goes on."""
    for crash in (CrashAt(9), CrashAt(-1)):
        model, tracker = make_model(), make_tracker()
        backup = callbacks.BackupAndRestore(tmp_path / "backup", 1, delete_checkpoint=False)
        track = callbacks.Track(tracker, histogram_freq=1, write_images=True)
        if crash.steps > 0:
            with pytest.raises(Crash):
                fit(model, callbacks=[track, backup, crash], epochs=3)
        else:
            history = fit(model, callbacks=[track, backup, crash], epochs=3)
    return history, int(model.state.step)


def test_a_resumed_run_is_the_same_run(tmp_path):
    trackers = []

    def make():
        trackers.append(Recorded())
        return trackers[-1]

    _, last = resumed(tmp_path, make)
    first, second = trackers
    assert [run for _, run in first.started + second.started] == [None, "run 1"]
    assert [step for step, _ in second.logged][-1] == last
    epochs = [values["epoch"] for _, values in first.logged + second.logged]
    assert epochs == [0, 1, 2]


def test_a_process_that_becomes_the_master_begins_a_run_within_an_epoch():
    tracker, model = Recorded(), make_model()
    fit(model, epochs=1)
    track = callbacks.Track(tracker, update_freq=1)
    track.set_model(model)
    track.set_params({"steps": 5})
    # What an elastic job calls on it: no epoch begins.
    track.on_train_begin()
    track.on_train_batch_begin(2)
    track.on_train_batch_end(2, {"loss": 1.0})
    track.on_epoch_end(0, {"loss": 2.0})
    step = int(model.state.step) + 1
    assert [(at, values.get("loss")) for at, values in tracker.logged] == [(step, None), (step, 2)]
    assert len(tracker.started) == 1


@pytest.mark.parametrize("method", ["log", "log_arrays", "finish"])
def test_a_tracker_that_fails_ends_no_training(method, caplog):
    def fail(*args):
        raise OSError(28, "No space left on device")

    fail.__name__ = method
    tracker, model = Recorded(), make_model()
    setattr(tracker, method, fail)
    fit(model, callbacks=[callbacks.Track(tracker, histogram_freq=1)], epochs=2)
    assert int(model.state.step) == 2 * 5, "Two epochs of 40 rows in batches of 8."
    (text,) = [text for text in caplog.messages if "The tracker Recorded failed" in text]
    assert f"failed in {method}." in text
    assert "No space left on device" in text


def test_a_tracker_that_cannot_start_ends_the_call():
    def fail(*args):
        raise ConnectionError("no key")

    tracker = Recorded()
    tracker.start = fail
    with pytest.raises(ConnectionError, match="no key"):
        fit(make_model(), callbacks=[callbacks.Track(tracker)])


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="update_freq must be 'epoch' or a number of steps"):
        callbacks.Track(Recorded(), update_freq=0)
    with pytest.raises(ValueError, match="histogram_freq must be at least 0"):
        callbacks.Track(Recorded(), histogram_freq=-1)


def records_of(data, block_size=2**15):
    """Yields the records of a log in LevelDB's format, behind the 7 bytes of wandb's own head.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (rest := block_size - place % block_size) < 7:
            place += rest
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # Whole, or the last part.
            yield parts
            parts = b""


def read_offline_run(file):
    """Returns the history, the configuration and the ids of runs in a file of wandb."""
    from wandb.proto import wandb_internal_pb2

    rows, configuration, ids = [], {}, set()
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        if record.HasField("run"):
            ids.add(record.run.run_id)
            for item in record.run.config.update:
                configuration[item.key] = json.loads(item.value_json)
    return rows, configuration, ids


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    make = lambda: callbacks.WeightsAndBiases("digits", folder=tmp_path, mode="offline")  # noqa: E731
    history, last = resumed(tmp_path, make)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    found = [read_offline_run(file) for file in files]
    assert len({run for _, _, ids in found for run in ids}) == 1
    rows = [row for rows, _, _ in found for row in rows if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(history.history["loss"])
    assert rows[-1]["_step"] == last
    assert found[0][1]["optimizer"]["optimizer.momentum"] == "0.9"
    assert any("Dense_0/kernel/histogram/bins" in row for rows, _, _ in found for row in rows)


def test_mlflow_in_a_local_store(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    uri = f"sqlite:///{tmp_path}/runs.db"
    client = mlflow.MlflowClient(uri)
    client.create_experiment("digits", artifact_location=(tmp_path / "files").as_uri())
    history, last = resumed(tmp_path, lambda: callbacks.MLflow("digits", name="a", uri=uri))
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    logged = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.value for metric in logged] == pytest.approx(history.history["loss"])
    assert logged[-1].step == last
    assert run.data.params["optimizer.momentum"] == "0.9"
    paths = [
        path.relative_to(tmp_path / "files").as_posix().split("/", 2)[-1]
        for path in (tmp_path / "files").rglob("*.*")
    ]
    assert "configuration.json" in paths
    assert f"histograms/{last}.json" in paths
    assert f"images/Dense_0/kernel/{last}.png" in paths


def test_comet_offline(tmp_path, monkeypatch):
    pytest.importorskip("comet_ml", reason="needs comet_ml")
    make = lambda: callbacks.Comet("digits", folder=tmp_path / "comet", online=False)  # noqa: E731
    history, last = resumed(tmp_path, make)
    files = sorted((tmp_path / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    keys, messages = set(), []
    for file in files:
        with zipfile.ZipFile(file) as archive:
            keys.add(json.loads(archive.read("experiment.json"))["offline_id"])
            lines = archive.read("messages.json").decode().splitlines()
            messages += [json.loads(line)["payload"] for line in lines]
    assert len(keys) == 1
    found = [m["metric"] for m in messages if m.get("metric", {}).get("metricName") == "loss"]
    assert [metric["metricValue"] for metric in found] == pytest.approx(history.history["loss"])
    assert found[-1]["step"] == last
    parameters = {
        m["param"]["paramName"]: m["param"]["paramValue"] for m in messages if "param" in m
    }
    assert parameters["optimizer/optimizer.momentum"] == "0.9"
    kinds = {message.get("upload_type") for message in messages}
    assert {"histogram3d", "visualization"} < kinds


def test_a_missing_package_is_named(monkeypatch):
    import sys

    for kind, package in (
        ("WeightsAndBiases", "wandb"),
        ("MLflow", "mlflow"),
        ("Comet", "comet_ml"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf"{kind} needs {package}: pip install"):
            getattr(callbacks, kind)()


@pytest.mark.multiprocess
def test_the_master_alone_tracks(tmp_path):
    from processes import SCRIPTS, launch

    done = launch(2, SCRIPTS / "track_run.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    assert file.name == "0.json"
    assert json.loads(file.read_text()) == [[3, 0], [6, 1]]
