"""What keeps training from going on with other processes in an elastic job."""

import flax.linen as nn
import numpy as np
import pytest

import tnt_jax as tnt

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


class Linear(nn.Module):
    """Sums of the inputs."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1)(x)


@pytest.fixture(autouse=True)
def no_job():
    """Ends the job that other tests have begun, and the one of the test."""
    tnt.shutdown()
    yield
    tnt.shutdown()


def compiled(accumulation=None, on_nan=None, **options):
    model = tnt.Model(Linear(), **options)
    optimizer = tnt.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
    model.compile(optimizer, loss="mse", on_nan=on_nan)
    model.build((None, 3))
    return model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"reproducible": True}, None),
        ({"shard_optimizer_state": True}, "the optimizer's state is sharded"),
        ({"gradient_compression": "bfloat16"}, "what compression leaves out is sharded"),
        ({"accumulation": 2}, None),
        ({"on_nan": "raise"}, None),
        ({"on_nan": "skip"}, None),
        ({"on_nan": "rollback"}, None),
        ({"sync": tnt.LocalSteps(groups="process")}, None),
        (
            {"sync": tnt.LocalSteps(groups=[[0]])},
            "a group that trains by itself may lose a part of its ranks",
        ),
    ],
    ids=str,
)
def test_what_other_processes_would_lack_is_named(options, expected):
    assert compiled(**options)._core.why_not_elastic() == expected


def test_another_model_is_an_obstacle_until_it_is_forgotten():
    first, second = compiled(), compiled()
    expected = "the arrays of another model would be lost"
    assert first._core.why_not_elastic() == second._core.why_not_elastic() == expected
    second.itself = second
    del second
    assert first._core.why_not_elastic() is None


def test_a_view_of_the_model_is_an_obstacle():
    model = compiled()
    view = model.view(Linear())
    assert model._core.why_not_elastic() == "the arrays of another model would be lost"
    del view
    assert model._core.why_not_elastic() is None


@pytest.fixture
def custom_step():
    """A step of a custom training loop, and a batch for it."""
    dataset = tnt.distribute(X, X[:, :1], batch_size=8, shuffle=False)

    @tnt.distributed_step
    def train_step(state, batch):
        loss = tnt.compute_average_loss(((batch.inputs - state) ** 2).sum(1))
        return state, {"loss": loss}

    return train_step, next(iter(dataset))


def test_a_custom_training_loop_is_an_obstacle(custom_step):
    step, batch = custom_step
    model = compiled()
    assert model._core.why_not_elastic() is None
    step(np.zeros(3, np.float32), batch)
    expected = "the state of a custom training loop would be lost"
    assert model._core.why_not_elastic() == expected


class Line:
    """Stands for the line of an elastic job to its launcher."""

    def __init__(self, has_joined):
        self.has_joined, self.refused = has_joined, None

    def refuse(self, why):
        self.refused = why


def test_a_custom_training_loop_of_an_elastic_job_warns_once(custom_step, monkeypatch, caplog):
    step, batch = custom_step
    monkeypatch.setattr("tnt_jax.train.loops.step.link", lambda: Line(has_joined=True))
    for _ in range(2):
        step(np.zeros(3, np.float32), batch)
    (text,) = [text for text in caplog.messages if "elastic" in text]
    assert "train_step cannot go on in place, because a custom training loop holds" in text


def test_a_process_that_is_to_join_refuses_a_custom_training_loop(custom_step, monkeypatch):
    step, batch = custom_step
    line = Line(has_joined=False)
    monkeypatch.setattr("tnt_jax.train.loops.step.link", lambda: line)

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr("tnt_jax.train.loops.step.os._exit", end)
    with pytest.raises(SystemExit):
        step(np.zeros(3, np.float32), batch)
    assert "it has not the state of train_step" in line.refused
