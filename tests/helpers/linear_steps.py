"""A linear model as parts of a step, and the same training in NumPy by hand: loss, gradients,
statistics and sums of an epoch in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.adapters.base import Applied, Variables
from tnt_jax.distributed.sums.random_rows import key_for
from tnt_jax.train.contracts import Batch, LossTerm, StepParts

FEATURES, SCALE, PENALTY, MOMENTUM = 3, 0.5, 0.1, 0.9


def parameters():
    rng = np.random.default_rng(7)
    return {"w": rng.normal(size=FEATURES).astype(np.float32), "b": np.float32(0.3)}


def model_state():
    return {"mean": np.zeros(FEATURES, np.float32), "calls": np.zeros((), np.int32)}


def make_batches(*rows, size=16, seed=0):
    """Returns batches of `size` rows of which the first of `rows` are real; without a mask where
    all are.
    """
    rng = np.random.default_rng(seed)

    def batch(num_real):
        return Batch(
            rng.normal(size=(size, FEATURES)).astype(np.float32),
            rng.normal(size=size).astype(np.float32),
            rng.uniform(0.5, 2, size).astype(np.float32),
            None if num_real == size else (np.arange(size) < num_real).astype(np.float32),
        )

    return [batch(num_real) for num_real in rows]


def mask_of(batch):
    return jnp.ones(len(batch.targets)) if batch.mask is None else batch.mask


def apply(params, model_state, inputs, *, key, train, mask):
    """Returns `x w + b`, moving means of the inputs, and noise of which metrics take the sum."""
    rows = jnp.ones(len(inputs)) if mask is None else mask
    noise = jnp.zeros(len(inputs))
    if train:
        draw = lambda key, x: jax.random.uniform(key, (len(x),))  # noqa: E731
        noise = draw(key_for(draw, key, inputs, {}), inputs)
        mean = rows @ inputs / jnp.maximum(rows.sum(), 1)
        model_state = {
            "mean": MOMENTUM * model_state["mean"] + (1 - MOMENTUM) * mean,
            "calls": model_state["calls"] + 1,
        }
    penalty = PENALTY * jnp.sum(params["w"] ** 2)
    outputs = inputs @ params["w"] + params["b"]
    return Applied(outputs, model_state, penalty, {"noise": jnp.sum(rows * noise)})


def loss_terms(outputs, batch):
    rows = mask_of(batch)
    total = jnp.sum(rows * batch.weight * (outputs - batch.targets) ** 2)
    return [LossTerm(total, jnp.sum(rows), SCALE)]


def increments(outputs, batch):
    rows = mask_of(batch)
    return {"rows": rows.sum(), "error": jnp.sum(rows * jnp.abs(outputs - batch.targets))}


def make_parts(forward=apply):
    return StepParts(forward, loss_terms, increments)


class LinearAdapter:
    """The part of an adapter that a trainer uses."""

    name, holds_variables, knows_penalty = "linear", False, False

    def __init__(self):
        self.attached = []

    def sample_inputs(self):
        return None

    def init(self, inputs, *, seed):
        return Variables(parameters(), model_state())

    def initializer(self, inputs, *, seed):
        return None

    def fresh_variables(self, inputs, *, seed):
        return None

    def attach(self, inputs):
        self.attached.append(inputs)

    apply = staticmethod(apply)


class ByHand:
    """Trains with NumPy on whole batches, by stochastic gradient descent.

    Attributes:
        params, mean, calls: What training changes.
        loss: Sum of the losses of batches by their rows, and those rows.
        rows, error: Sums of the metrics.
    """

    def __init__(self, learning_rate=0.1, *, accumulation_steps=1):
        self.learning_rate, self.accumulation_steps = learning_rate, accumulation_steps
        self.params = {name: np.float64(value) for name, value in parameters().items()}
        self.mean, self.calls = np.zeros(FEATURES), 0
        self.total = {"w": np.zeros(FEATURES), "b": 0.0}
        self.clear()

    def clear(self):
        self.loss, self.rows, self.error = np.zeros(2), 0.0, 0.0

    def look(self, batch):
        """Adds a batch to the sums; returns its errors, its weights and its real inputs."""
        real = slice(0, int(mask_of(batch).sum()))
        x, y, weight = (np.float64(part[real]) for part in batch[:3])
        errors = x @ self.params["w"] + self.params["b"] - y
        penalty = PENALTY * np.sum(self.params["w"] ** 2)
        loss = SCALE * np.mean(weight * errors**2) + penalty
        self.loss += [loss * len(x), len(x)]
        self.rows, self.error = self.rows + len(x), self.error + np.abs(errors).sum()
        return errors, weight, x

    def train(self, batch):
        errors, weight, x = self.look(batch)
        slope = 2 * SCALE * weight * errors / len(x)
        self.total["w"] += slope @ x + 2 * PENALTY * self.params["w"]
        self.total["b"] += slope.sum()
        self.mean = MOMENTUM * self.mean + (1 - MOMENTUM) * x.mean(0)
        self.calls += 1
        if self.calls % self.accumulation_steps == 0:
            for name, total in self.total.items():
                self.params[name] -= self.learning_rate * total / self.accumulation_steps
            self.total = {"w": np.zeros(FEATURES), "b": 0.0}

    def assert_state_is(self, state):
        assert int(state.step) == self.calls == int(state.model_state["calls"])
        for name, value in self.params.items():
            np.testing.assert_allclose(state.params[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.model_state["mean"], self.mean, rtol=1e-5, atol=1e-6)

    def assert_sums_are(self, sums):
        np.testing.assert_allclose(sums["loss"], self.loss, rtol=1e-5)
        np.testing.assert_allclose(sums["metrics"]["outputs"]["rows"], self.rows)
        np.testing.assert_allclose(sums["metrics"]["outputs"]["error"], self.error, rtol=1e-5)
