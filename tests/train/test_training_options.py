"""Options of training: accumulation, several steps in one program, own objectives, views."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from reference_trainer import Net, make_data
from training import assert_close, crossentropy

import tnt_jax as tnt

# ---- Gradient accumulation ----


# ---- Several steps in one program ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"steps_per_execution": 0},
            "steps_per_execution must be at least 1 or 'auto', but is 0",
        ),
        ({"run_eagerly": True}, "jax.disable_jit"),
        ({"jit_compile": "no"}, "jit_compile must be True, False or 'auto'"),
        ({"objective": lambda params, batch, rngs: 0}, "takes the place of a loss"),
    ],
)
def test_invalid_options_of_compile(options, message):
    with pytest.raises(ValueError, match=message):
        tnt.Model(Net()).compile("sgd", loss="mse", **options)


# ---- An objective of the user's own ----


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 4])
def test_objective_equals_the_loss_it_spells_out(use_ranks, num_ranks):
    use_ranks(num_ranks)
    net = Net(dropout=0.3)

    def objective(params, batch, rngs):
        logits = net.apply({"params": params}, batch.inputs, train=bool(rngs), rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return losses, {"accuracy": (jnp.argmax(logits, -1) == batch.targets).astype(jnp.float32)}

    x, y, weight = make_data(18)
    results = []
    for settings in ({"loss": crossentropy(), "metrics": ["accuracy"]}, {"objective": objective}):
        model = tnt.Model(net)
        model.compile(optax.sgd(0.1), **settings)
        history = model.fit(
            x, y, batch_size=9, epochs=2, shuffle=False, verbose=0, sample_weight=weight
        ).history
        results.append(
            (
                history,
                model.variables,
                model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True),
            )
        )
    assert_close(results[1], results[0])
    assert model.metrics_names == ["loss", "accuracy"]


def test_fit_runs_where_jit_is_disabled(use_ranks):
    use_ranks(1)
    x, y = np.ones((8, 3), np.float32), np.zeros((8, 2), np.float32)
    results = []
    for is_disabled in (False, True):
        model = tnt.Model(nn.Dense(2))
        model.compile(optax.sgd(0.1), loss="mean_squared_error")
        with jax.disable_jit(is_disabled):
            history = model.fit(x, y, batch_size=4, epochs=1, verbose=0).history
        results.append((history, model.variables["params"]))
    assert_close(results[1], results[0])


def test_objective_with_the_models_own_forward_pass_keeps_model_state(use_ranks):
    use_ranks(4)
    x, y, _ = make_data(16)
    net = Net(batch_norm=True, dropout=0.3, axis_name="data")

    def objective(params, batch, rngs, apply):
        return optax.softmax_cross_entropy_with_integer_labels(
            apply(params, batch.inputs), batch.targets
        )

    model = tnt.Model(net)
    model.compile(optax.sgd(0.1), objective=objective)
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    means = model.variables["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.abs(means).max() > 1e-3


@pytest.mark.parametrize(
    ("objective", "error", "message"),
    [
        (
            lambda params, batch, rngs: jnp.mean(batch.inputs),
            ValueError,
            r"one value per row, shape \(4,\)",
        ),
        (lambda params, batch, rngs: (batch.inputs, 3), TypeError, "a dict of metrics"),
        (
            lambda params, batch, rngs: (batch.inputs, {"m": jnp.zeros(3)}),
            ValueError,
            r"but m has the shape \(3,\)",
        ),
    ],
)
def test_objective_must_give_values_per_row(use_ranks, objective, error, message):
    use_ranks(2)
    x, y, _ = make_data(8)
    model = tnt.Model(Net())
    model.compile("sgd", objective=objective)
    with pytest.raises(error, match=message):
        model.fit(x, y, batch_size=8, verbose=0)


# ---- Views ----
