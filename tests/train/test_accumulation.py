"""Accumulation updates by the mean gradient of several steps, as Keras and a loop by hand do."""

import jax
import keras
import optax
import pytest
from long_params import long_but_last
from reference_trainer import Net, make_data
from training import assert_close, crossentropy, fit, train_accumulating

import tnt_jax as tnt
from tnt_jax.train.contracts import Batch


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
@pytest.mark.parametrize("num_steps", [2, 5])
def test_accumulation_updates_by_the_mean_gradient(use_ranks, num_ranks, num_steps):
    use_ranks(num_ranks)
    # 4 batches an epoch, the last of 3 rows; 5 steps do not divide the 8 of two epochs.
    model, _ = fit(
        Net(), tnt.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=num_steps), 27
    )
    expected = train_accumulating(optax.sgd(0.1, momentum=0.9), 27, 8, num_steps)
    assert_close(model.variables["params"], expected)


def test_accumulation_equals_that_of_keras(use_ranks):
    use_ranks(2)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(
            keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
            )
        )
    x, y, _ = make_data(27)
    make_optimizer = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)  # noqa: E731
    settings = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    models[0].compile(make_optimizer(), **settings)
    models[0].fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    wrapped = tnt.Model(models[1])
    wrapped.compile(make_optimizer(), **settings)
    wrapped.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_close(models[1].get_weights(), models[0].get_weights())
    assert wrapped.optimizer.iterations == int(models[0].optimizer.iterations) == 2


def test_gradients_are_exchanged_in_the_branch_that_updates_only(use_ranks):
    use_ranks(2)
    model, _ = fit(Net(), "sgd")
    x, y, _ = make_data(8)
    trainer = model._trainer
    model.compile(tnt.optimizers.SGD(0.1, gradient_accumulation_steps=4), loss=crossentropy())
    model.fit(x, y, batch_size=8, verbose=0)
    text = trainer.lower_train_step(Batch(x, y)).as_text()
    outside, _, inside = text.partition("stablehlo.case")
    num_params = len(jax.tree.leaves(model.variables["params"]))
    # Outside are the loss of the batch and its one term.
    assert outside.count("stablehlo.all_reduce") == 2
    assert inside.count("stablehlo.all_reduce") == num_params


def test_accumulation_needs_at_least_two_steps():
    with pytest.raises(
        ValueError, match="gradient_accumulation_steps must be at least 2 or None, got 1"
    ):
        tnt.optimizers.SGD(0.1, gradient_accumulation_steps=1)
