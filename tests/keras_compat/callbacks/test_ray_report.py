"""What `fit` reports to Ray, and how it goes on from what Ray has stored, with Ray's part taken by
folders; `tests/on_ray/test_ray_train.py` has the real one.
"""

import shutil

import flax.linen as nn
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.keras_compat.callbacks import tuners

RNG = np.random.default_rng(0)


class Storage:
    """Takes reports as Ray does; `stored` is the folder of the last checkpoint."""

    def __init__(self, folder, checkpoint=None):
        self.folder, self.name, self.is_over = folder, "the Ray Train run r", False
        self.metrics, self.stored, self.waits = [], checkpoint, 0
        if checkpoint is not None:
            shutil.copytree(checkpoint, folder)

    def report(self, metrics, *, checkpoints=()):
        self.metrics.append(dict(metrics))
        if checkpoints:
            self.stored = self.folder.parent / f"{self.folder.name}-{len(self.metrics)}"
            for name in checkpoints:
                shutil.copytree(self.folder / name, self.stored / name)

    def wait(self):
        self.waits += 1


@pytest.fixture
def on_ray(monkeypatch, tmp_path, use_ranks):
    """Returns a function that makes this process a worker of Ray that starts (again)."""
    monkeypatch.delenv("TNT_CHECKPOINT_DIR", raising=False)

    def start(number, checkpoint=None, *, role="worker"):
        use_ranks(2)
        storage = Storage(tmp_path / f"start{number}", checkpoint)
        monkeypatch.setattr(tuners, "role", lambda: role)
        monkeypatch.setattr(tuners, "open_storage", lambda: storage)
        return storage

    return start


def data():
    x = np.random.default_rng(1).normal(size=(30, 3)).astype("f4")
    return x, x.sum(1, keepdims=True)


def train(*, epochs=2, callbacks=None, **arguments):
    model = tnt.Model(nn.Dense(1), seed=3)
    model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), loss="mse", steps_per_execution=1)
    history = model.fit(
        *data(), batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks, **arguments
    )
    return model, history


class Stop(tnt.callbacks.Callback):
    """Ends the function as a fault would, after a number of updates."""

    def __init__(self, update):
        super().__init__()
        self.update = update

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == self.update:
            raise RuntimeError("a fault on purpose")


def have_same_weights(one, other):
    return all(
        np.array_equal(a, b) for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
    )


def test_fit_reports_each_epoch_and_the_last_checkpoint_by_itself(on_ray):
    storage = on_ray(1)
    model, history = train()
    first, second = ({"loss": loss} for loss in history.history["loss"])
    assert storage.metrics == [first | {"epoch": 0}, second | {"epoch": 1}, second | {"epoch": 1}]
    (backup,) = storage.stored.glob("fit-1/*")
    assert backup.name.startswith("tnt_jax_backup_")
    assert storage.waits == 1
    fresh = tnt.Model(nn.Dense(1), seed=4)
    fresh.compile("sgd", loss="mse")
    fresh.build(data()[0])
    fresh.load_weights(storage.stored / "fit-1")
    assert have_same_weights(fresh, model)


def test_a_function_that_starts_again_goes_on_in_the_epoch_with_the_same_bits(on_ray):
    report = tnt.callbacks.RayReport(save_freq=3)
    on_ray(0)
    expected, history = train()
    broken = on_ray(1)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(callbacks=[Stop(7), report])
    assert broken.metrics[-1] == {"epoch": 1, "batch": 2}, "After update 6; an epoch has 4."
    on_ray(2, broken.stored)
    updates = []

    class Count(tnt.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            updates.append(self.model.optimizer.iterations)

    found, again = train(callbacks=[Count(), tnt.callbacks.RayReport(save_freq=3)])
    assert updates == [7, 8]
    assert again.history == history.history
    assert have_same_weights(found, expected)


def test_a_function_of_two_fits_skips_the_one_that_has_ended(on_ray):
    first = on_ray(1)
    model, history = train()
    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(*data(), batch_size=8, epochs=2, verbose=0,
                  callbacks=[Stop(14), tnt.callbacks.RayReport("epoch")])  # fmt: skip
    assert {path.name for path in first.stored.iterdir()} == {"fit-1", "fit-2"}
    second = on_ray(2, first.stored)
    model, again = train()
    assert again.history == history.history
    assert second.metrics == [], "The first fit had reported all of it."
    later = model.fit(*data(), batch_size=8, epochs=2, verbose=0)
    assert len(later.history["loss"]) == 2
    assert [metrics["epoch"] for metrics in second.metrics] == [1, 1]


@pytest.mark.parametrize("chosen", ["none", "resume", "backup", "environment"])
def test_metrics_alone_are_reported_where_checkpoints_are_elsewhere(
    on_ray, monkeypatch, tmp_path, chosen
):
    storage = on_ray(1)
    arguments = {
        "none": {"callbacks": [tnt.callbacks.RayReport(save_freq=None)]},
        "resume": {"resume": tmp_path / "own"},
        "backup": {"callbacks": [tnt.callbacks.BackupAndRestore(tmp_path / "own")]},
        "environment": {},
    }[chosen]
    if chosen == "environment":
        monkeypatch.setenv("TNT_CHECKPOINT_DIR", str(tmp_path / "own"))
    train(**arguments)
    assert [metrics["epoch"] for metrics in storage.metrics] == [0, 1]
    assert storage.stored is None
    assert (tmp_path / "own").exists() == (chosen in ("resume", "environment"))


def test_a_refused_checkpoint_is_not_reported(on_ray):
    storage = on_ray(1)
    model = tnt.Model(nn.Dense(1), seed=3)
    model.compile(tnt.optimizers.SGD(1e30), loss="mse")
    model.fit(*data(), batch_size=8, epochs=1, verbose=0)
    assert [set(metrics) for metrics in storage.metrics] == [{"loss", "epoch"}]
    assert storage.stored is None


def test_a_trial_of_ray_tune_reports_once_an_epoch(on_ray):
    storage = on_ray(1, role="trial")
    train(epochs=3)
    assert [metrics["epoch"] for metrics in storage.metrics] == [0, 1, 2]
    assert storage.stored is not None


def test_outside_of_ray_nothing_is_added_and_a_report_does_nothing(use_ranks):
    use_ranks(1)
    model, _ = train(callbacks=[tnt.callbacks.RayReport()])
    assert model.built


@pytest.mark.parametrize("freq", [0, "often", True])
def test_an_invalid_frequency_is_refused(freq):
    with pytest.raises(ValueError, match="save"):
        tnt.callbacks.RayReport(save_freq=freq)
