"""Several steps in one program: the same numbers, fewer starts, and batches that group."""

from itertools import pairwise

import flax.linen as nn
import jax
import keras
import numpy as np
import optax
import pytest
from long_params import long_but_last
from reference_trainer import Net, make_data
from training import assert_close, crossentropy, fit, train_accumulating

import tnt_jax as tnt
from tnt_jax.data.sources import HostBatch
from tnt_jax.train import execution
from tnt_jax.train.execution import InFlight, choose_num_steps, in_groups


class Batches(tnt.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.losses = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.losses.append(logs["loss"])


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_steps_in_one_program_equal_single_steps(use_ranks, num_ranks):
    use_ranks(num_ranks)
    # 7 batches, the last of 3 rows: two programs of 3 steps, and one step, which callbacks see as
    # the end of a whole group, like in Keras.
    net = Net(batch_norm=True, dropout=0.3, axis_name="data")
    single, fused = Batches(), Batches()
    expected, expected_history = fit(net, "adam", 51, callbacks=[single])
    model, history = fit(
        net, "adam", 51, callbacks=[fused], compile_options={"steps_per_execution": 3}
    )
    assert_close(model.variables, expected.variables)
    assert_close(history, expected_history)
    assert (fused.begun, fused.ended) == ([0, 3, 6] * 2, [2, 5, 8] * 2)
    assert_close(fused.losses, [single.losses[index] for index in (2, 5, 6, 9, 12, 13)])


def test_callbacks_see_steps_that_fill_no_program_as_one_group(use_ranks):
    use_ranks(2)
    seen = Batches()
    profiler = tnt.callbacks.RuntimeProfiler()
    fit(Net(), "sgd", 51, callbacks=[seen, profiler], compile_options={"steps_per_execution": 101})
    assert (seen.begun, seen.ended) == ([0] * 2, [100] * 2)
    assert [(epoch["niterations"], epoch["size"]) for epoch in profiler.epochs] == [(7, 51)] * 2


class InferenceBatches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls, self.losses = [], []

    def on_test_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch))
        self.losses.append(logs["loss"])

    def on_predict_batch_begin(self, batch, logs=None):
        self.calls.append(("predict begin", batch))

    def on_predict_batch_end(self, batch, logs=None):
        self.calls.append(("predict end", batch))


def infer(model, x, y, recorder):
    values = model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[recorder])
    return values, model.predict(x, batch_size=8, verbose=0, callbacks=[recorder])


@pytest.mark.parametrize("num_ranks", long_but_last(1, 3))
def test_evaluation_and_prediction_run_several_steps_in_one_program(use_ranks, num_ranks):
    use_ranks(num_ranks)
    x, y, _ = make_data(51)
    model, fused, single = tnt.Model(Net(batch_norm=True)), InferenceBatches(), InferenceBatches()
    model.compile("sgd", loss=crossentropy(), metrics=["accuracy"])
    expected = infer(model, x, y, single)
    model.compile("sgd", loss=crossentropy(), metrics=["accuracy"], steps_per_execution=3)
    assert_close(infer(model, x, y, fused), expected)
    assert_close(fused.losses, [single.losses[index] for index in (2, 5, 6)])
    groups = [("begin", 0), ("end", 2), ("begin", 3), ("end", 5), ("begin", 6), ("end", 8)]
    assert fused.calls == groups + [(f"predict {moment}", batch) for moment, batch in groups]


class Convolving(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(3, (3,))(x[..., None])
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1)))


class FeaturesFirst(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (3, 1, 3))
        x = jax.lax.conv(x[:, None], kernel, (1,), "SAME")
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1)))


# Evaluation does not transpose operands, and runs step by step where features come first.
@pytest.mark.parametrize(("module", "num_groups"), [(Convolving(), 1), (FeaturesFirst(), 3)])
def test_several_steps_of_convolutions_are_one_program(use_ranks, module, num_groups):
    use_ranks(2)
    expected, expected_history = fit(module, "sgd", 24)
    model, history = fit(module, "sgd", 24, compile_options={"steps_per_execution": 3})
    seen = InferenceBatches()
    infer(model, *make_data(24)[:2], seen)
    assert len(seen.losses) == num_groups
    assert hasattr(model._trainer.programs._train_steps, "lower")
    assert_close(model.variables, expected.variables)
    assert_close(history, expected_history)


def test_accumulation_within_a_program(use_ranks):
    use_ranks(2)
    model, _ = fit(
        Net(),
        tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        56,
        compile_options={"steps_per_execution": 3},
    )
    assert_close(model.variables["params"], train_accumulating(optax.sgd(0.1), 56, 8, 2))


def test_auto_chooses_after_timed_steps_and_trains_alike(use_ranks):
    use_ranks(2)
    steps = Batches()
    expected, _ = fit(Net(), "sgd", 400, 8, epochs=1)
    model, _ = fit(
        Net(),
        "sgd",
        400,
        8,
        epochs=1,
        callbacks=[steps],
        compile_options={"steps_per_execution": "auto"},
    )
    assert_close(model.variables, expected.variables)
    assert steps.ended[:16] == list(range(16))
    chosen = model._core.compilation.steps_per_execution
    assert chosen >= 1
    assert steps.ended[16:] == [first + chosen - 1 for first in range(16, 50, chosen)]


@pytest.mark.parametrize(
    ("step_s", "available", "expected"),
    [
        (1.0, 100, 1),
        (0.005, 100, 1),
        (0.003, 100, 2),
        (0.0006, 100, 16),
        (1e-5, 100, 32),
        (1e-5, None, 128),
        (1e-5, 1, 1),
    ],
)
def test_choose_num_steps(step_s, available, expected):
    assert choose_num_steps(step_s, available=available) == expected


def test_groups_hold_equal_shapes_and_keep_the_order():
    sizes = [4, 4, 4, 4, 2, 2, 4, 4]
    items = [HostBatch(np.full((size, 1), index), None, size) for index, size in enumerate(sizes)]
    groups = [[int(item.data[0, 0]) for item in group] for group in in_groups(iter(items), 3)]
    assert groups == [[0, 1, 2], [3], [4], [5], [6], [7]]


class Result:
    """The result of a program that has run once `waited` has been asked for it."""

    def __init__(self, number, waited):
        self.number, self.waited = number, waited

    def block_until_ready(self):
        self.waited.append(self.number)
        return self


def test_with_other_devices_the_host_waits_for_each_program_but_a_few():
    waited, running = [], InFlight()
    for number in range(10):
        running.add(Result(number, waited))
    assert waited == list(range(10 - execution.IN_FLIGHT))


@pytest.mark.parametrize("is_alone", [False, True])
def test_programs_that_just_fit_the_memory_run_one_by_one(is_alone):
    waited, running = [], InFlight(is_alone=is_alone, most=0)
    for number in range(5):
        running.add(Result(number, waited))
    assert waited == list(range(5))


@pytest.mark.parametrize(
    ("step_s", "num_processes", "gaps"),
    # Quick programs: all that may run ahead, of which half have run after a wait. Slow ones, and
    # those of a group of a larger job: few.
    [(1e-4, 1, {16, 17}), (0.004, 1, {2, 3}), (1.0, 1, {2}), (1e-4, 2, {2})],
)
def test_alone_the_host_waits_seldom_and_is_ahead_by_the_time_of_the_steps(
    monkeypatch, step_s, num_processes, gaps
):
    monkeypatch.setattr(execution.jax, "process_count", lambda: num_processes)
    waited, running = [], InFlight(is_alone=True)
    monkeypatch.setattr(
        execution.time, "perf_counter", lambda: 1.0 + step_s * (waited[-1] + 1 if waited else 0)
    )
    ahead = []
    for number in range(200):
        running.add(Result(number, waited))
        ahead.append(number - (waited[-1] if waited else -1))
    later = [after - before for before, after in pairwise(waited[4:])]
    assert set(later) <= gaps
    most = min(0.02 / step_s, 32) if num_processes == 1 else 0
    assert max(ahead[20:]) <= max(execution.IN_FLIGHT, most) + 1
