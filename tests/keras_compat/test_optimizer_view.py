"""What is set on the optimizer of a model takes effect, and compiles nothing."""

import numpy as np
import optax
import pytest
from keras_beside import Net, compile_linen
from saved_runs import assert_equal_weights, fit, make_model

import tnt_jax as tnt


def test_setting_the_learning_rate_compiles_nothing():
    model = make_model()
    assert model.optimizer.learning_rate == pytest.approx(0.05)
    model.optimizer.learning_rate = 0.02
    fit(model)
    assert model.optimizer.learning_rate == pytest.approx(0.02)
    compiled = model._trainer.programs._train_step._cache_size()
    model.optimizer.learning_rate = 0.0
    before = model.get_weights()
    fit(model, epochs=1)
    model.optimizer.learning_rate = np.float32(0.01)
    fit(model, epochs=1)
    assert model._trainer.programs._train_step._cache_size() == compiled
    assert before is not None

    scheduled = make_model(
        optimizer=tnt.optimizers.SGD(tnt.schedules.ExponentialDecay(0.1, 5, 0.5))
    )
    fit(scheduled, epochs=1)
    assert scheduled.optimizer.learning_rate == pytest.approx(0.05)
    with pytest.raises(TypeError, match=r"schedule decides"):
        scheduled.optimizer.learning_rate = 0.1
    plain = make_model(optimizer=optax.sgd(0.1))
    fit(plain, epochs=1)
    assert not hasattr(plain.optimizer, "learning_rate")


def test_a_rate_of_zero_set_between_epochs_stops_learning():
    model = tnt.Model(Net())
    compile_linen(model)
    fit(model, epochs=1)
    model.optimizer.learning_rate = 0.0
    before = model.get_weights()
    fit(model, epochs=1)
    assert_equal_weights(model.get_weights(), before)
