"""Callbacks of a process that becomes the master, in an elastic job that loses the one before."""

from types import SimpleNamespace

import keras
import pytest

from tnt_jax import callbacks
from tnt_jax.keras_compat.callbacks import base, callback_list


@pytest.fixture
def become(monkeypatch):
    """Lets this process be one of two, and the master or not."""
    monkeypatch.setattr(callback_list, "get_process_count", lambda: 2)

    def become(*, is_master):
        for module in (base, callback_list):
            monkeypatch.setattr(module, "is_master_rank", lambda: is_master)

    return become


def opened(callback, model=None):
    hooks = callbacks.CallbackList([callback], model=model, epochs=4, steps=2)
    hooks.on_train_begin()
    return hooks


def end_epochs(hooks, epochs):
    for epoch in epochs:
        hooks.on_epoch_begin(epoch)
        hooks.on_epoch_end(epoch, {"loss": 1 / (epoch + 1)})


@pytest.mark.parametrize(
    "make",
    [
        callbacks.CSVLogger,
        lambda path: callbacks.OnMaster(callbacks.CSVLogger(path)),
        lambda path: keras.callbacks.CSVLogger(str(path)),
    ],
    ids=["ours", "ours on the master", "Keras's"],
)
def test_rows_of_the_earlier_master_stay(become, tmp_path, make):
    become(is_master=True)
    alone = opened(make(tmp_path / "alone.csv"))
    end_epochs(alone, range(4))
    alone.on_train_end()
    earlier = opened(make(tmp_path / "log.csv"))
    become(is_master=False)
    hooks = opened(make(tmp_path / "log.csv"))
    become(is_master=True)
    end_epochs(earlier, range(2))
    become(is_master=False)
    end_epochs(hooks, range(2))
    become(is_master=True)
    hooks.renew()
    end_epochs(hooks, range(2, 4))
    hooks.on_train_end()
    assert (tmp_path / "log.csv").read_bytes() == (tmp_path / "alone.csv").read_bytes()


def test_a_row_that_the_earlier_master_has_written_is_not_repeated(become, tmp_path):
    become(is_master=True)
    end_epochs(opened(callbacks.CSVLogger(tmp_path / "log.csv")), range(2))
    before = (tmp_path / "log.csv").read_bytes()
    become(is_master=False)
    hooks = opened(callbacks.CSVLogger(tmp_path / "log.csv"))
    become(is_master=True)
    hooks.renew()
    end_epochs(hooks, [1])
    hooks.on_train_end()
    assert (tmp_path / "log.csv").read_bytes() == before


def test_a_tracker_is_started_before_it_gets_the_rest_of_an_epoch(become):
    events = []
    tracker = SimpleNamespace(
        start=lambda configuration, run: events.append("start") or "run",
        log=lambda values, step: events.append(step),
        finish=lambda: events.append("finish"),
    )
    model = SimpleNamespace(
        resumption=SimpleNamespace(run={}),
        built=True,
        state=SimpleNamespace(step=0),
        optimizer=None,
    )
    become(is_master=False)
    hooks = opened(callbacks.Track(tracker, update_freq=1), model)
    hooks.on_epoch_begin(0)
    hooks.on_train_batch_begin(0)
    hooks.on_train_batch_end(0, {"loss": 1.0})
    become(is_master=True)
    hooks.renew()
    hooks.on_train_batch_begin(1)
    hooks.on_train_batch_end(1, {"loss": 0.5})
    hooks.on_epoch_end(0, {"loss": 0.75})
    hooks.on_train_end()
    assert events == ["start", 2, 2, "finish"]
