"""The timeline of a process, read back."""

import flax.linen as nn
import numpy as np
from traces import read_trace

import tnt_jax as tnt
from tnt_jax.distributed import timeline


class Watch(tnt.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        tnt.all_reduce(1.0)

    def on_train_batch_end(self, batch, logs=None):
        return None


def within(inner, outer):
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_a_fit_shows_steps_data_callbacks_calls_and_compilation(tmp_path, monkeypatch, use_ranks):
    tnt.shutdown()
    monkeypatch.setenv("TNT_TIMELINE", str(tmp_path / "timeline.json"))
    use_ranks(2)
    try:
        model = tnt.Model(nn.Dense(1))
        model.compile("sgd", loss="mse")
        x = np.ones((12, 3), np.float32)
        batches = ((x[:4], x[:4, :1]) for _ in range(6))
        model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0, callbacks=[Watch()])
    finally:
        timeline.stop()
    events = read_trace(tmp_path / "timeline.json")
    by_name = {}
    for event in events:
        by_name.setdefault(event["name"], []).append(event)
    assert [event["args"] for event in by_name["train step"]] == [
        {"epoch": epoch, "step": step} for epoch in (1, 2) for step in (1, 2, 3)
    ]
    (fit,) = by_name["Model.fit"]
    for name in ("train step", "wait for data", "Watch.on_train_batch_end", "Watch.on_epoch_end"):
        assert len(by_name[name]) >= 2, name
        assert all(within(event, fit) for event in by_name[name]), name
    for inner, outer in zip(by_name["all_reduce"], by_name["Watch.on_epoch_end"], strict=True):
        assert within(inner, outer)
    assert any(within(e, by_name["train step"][0]) for e in by_name["backend_compile"])
    assert {event["cat"] for event in events} == {
        "call", "wait", "data", "step", "callback", "compile"
    }  # fmt: skip
    assert len(by_name["put a batch on the devices"]) == 6
    assert fit["tid"] not in {event["tid"] for event in by_name["put a batch on the devices"]}


def test_nothing_is_recorded_without_a_file():
    assert timeline.span("a", "call") is timeline.span("b", "call")
    assert timeline.recorded(len, "len", "call") is len
