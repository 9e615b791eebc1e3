"""Fresh variables are made in a thread while the step is lowered: the same ones, once, and whatever
happens meanwhile.
"""

import json
import re
import runpy
import signal
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax.train import coming, compiled_steps, trainer

X = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
Y = X.sum(1).reshape(-1, 1)


class Net(nn.Module):
    """A network of this file alone, so that no other test has compiled its programs."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x))
        return nn.Dense(1)(nn.Dropout(self.rate, deterministic=not train)(x))


def make_model(optimizer=None, *, rate=0.0, **options):
    model = tnt.Model(Net(rate), **options)
    model.compile(optimizer or optax.sgd(0.1, momentum=0.9), loss="mse")
    return model


def fit(model, **options):
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, **options)
    return model.get_weights()


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def at_once(monkeypatch):
    """Lets a function run as if no thread made variables."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "coming_state", lambda *arguments, **options: None)
            return function()

    return run


@pytest.fixture
def makers(monkeypatch):
    """The names of the threads in which variables were made."""
    found, run = [], coming._run

    def noted(*arguments):
        found.append(threading.current_thread().name.rpartition("_")[0])
        return run(*arguments)

    monkeypatch.setattr(coming, "_run", noted)
    return found


def centered(learning_rate):
    """A transformation whose first state depends on the values of the parameters, read on the
    host.
    """

    def init(params):
        return float(sum(np.asarray(x).sum() for x in jax.tree.leaves(params)))

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -learning_rate * (g + 0.01 * state), grads), state

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "options"),
    [
        (4, optax.adamw(0.01), {"shard_optimizer_state": True}),
        (2, optax.inject_hyperparams(optax.adam)(0.01), {"precision": "mixed_bfloat16"}),
        (1, optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), {"frozen": ["Dense_0"]}),
        (2, tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2), {}),
        (1, centered(0.1), {}),
    ],
)
def test_variables_of_the_thread_are_those_that_are_made_at_once(
    use_ranks, makers, at_once, num_ranks, optimizer, options
):
    use_ranks(num_ranks)
    options = {"rate": 0.2, **options}
    found = fit(make_model(optimizer, **options))
    assert makers == ["tnt_jax-variables"]
    assert_same(found, at_once(lambda: fit(make_model(optimizer, **options))))
    assert len(makers) == 1


def test_the_step_is_compiled_before_the_variables_are_there(use_ranks, monkeypatch):
    use_ranks(2)
    is_compiled, compile_it, run = threading.Event(), compiled_steps._compile, coming._run

    def compile_and_tell(lowered):
        compile_it(lowered)
        is_compiled.set()

    def run_late(*arguments):
        assert is_compiled.wait(60)
        return run(*arguments)

    monkeypatch.setattr(compiled_steps, "_compile", compile_and_tell)
    monkeypatch.setattr(coming, "_run", run_late)
    model = make_model()
    fit(model)
    assert model.built


def test_variables_wait_for_nobody_who_only_asks_whether_there_are_any(use_ranks, monkeypatch):
    use_ranks(1)
    may_run, run = threading.Event(), coming._run

    def run_late(*arguments):
        assert may_run.wait(60)
        return run(*arguments)

    monkeypatch.setattr(coming, "_run", run_late)
    its_trainer = make_model()._core.trainer
    assert not its_trainer.is_built
    its_trainer.build(X)
    assert its_trainer.is_built
    described = jax.tree.map(lambda x: (x.shape, x.dtype), its_trainer.described().params)
    may_run.set()
    state = its_trainer.require_state()
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype), state.params)


def test_an_error_of_the_thread_is_raised_once_and_the_model_can_be_built_again(
    use_ranks, monkeypatch, at_once
):
    use_ranks(1)

    def fail(*arguments):
        raise MemoryError("no memory for the variables")

    model = make_model()
    with monkeypatch.context() as patch:
        patch.setattr(coming, "_run", fail)
        with pytest.raises(MemoryError, match="no memory for the variables"):
            fit(model)
        assert not model.built
        with pytest.raises(MemoryError, match="no memory for the variables"):
            model.build((None, 5))
        assert not model.built
    assert_same(fit(model), at_once(lambda: fit(make_model())))


def test_a_signal_ends_the_wait_and_another_fit_makes_the_same_variables(
    use_ranks, monkeypatch, at_once
):
    use_ranks(1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    may_run, run, main = threading.Event(), coming._run, threading.main_thread().ident

    def run_late(*arguments):
        signal.pthread_kill(main, signal.SIGINT)
        assert may_run.wait(60)
        return run(*arguments)

    model = make_model()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(coming, "_run", run_late)
            with pytest.raises(KeyboardInterrupt):
                fit(model)
            may_run.set()
        found = fit(model)
    finally:
        may_run.set()
        signal.signal(signal.SIGINT, before)
    assert_same(found, at_once(lambda: fit(make_model())))


def test_data_that_does_not_fit_leaves_a_model_that_can_be_trained(use_ranks, at_once):
    use_ranks(1)
    model = make_model()
    with pytest.raises(ValueError, match=r"mse|targets|outputs"):
        model.fit(X, np.zeros((40, 3), np.float32), batch_size=8, verbose=0)
    assert_same(fit(model), at_once(lambda: fit(make_model())))


def test_weights_that_were_loaded_before_are_kept(use_ranks, tmp_path, at_once):
    use_ranks(1)
    model = make_model()
    fit(model)
    model.save_weights(tmp_path / "own.weights.h5")
    other = make_model()
    other.build((None, 5))
    other.load_weights(tmp_path / "own.weights.h5")
    assert_same(other.get_weights(), model.get_weights())


def test_without_compilation_nothing_is_made_in_a_thread(use_ranks, makers):
    use_ranks(1)
    with jax.disable_jit():
        model = make_model()
        model.build((None, 5))
    assert jnp.isfinite(model.get_weights()[0]).all()
    assert not makers


@pytest.mark.multiprocess
def test_process_0_makes_the_variables_of_all_and_its_errors_are_theirs(use_ranks, tmp_path):
    script = SCRIPTS / "make_variables.py"
    done = launch(2, script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    use_ranks(1)
    alone = runpy.run_path(str(script))["found_by_process"]()
    first, second = [json.loads((tmp_path / f"process{i}").read_text()) for i in (0, 1)]
    assert (first["of build"], first["of fit"]) == (1, 2) == (alone["of build"], alone["of fit"])
    assert (second["of build"], second["of fit"]) == (0, 0)
    assert first["built"] == second["built"] == alone["built"]
    assert first["trained"] == second["trained"] == first["after errors"] == second["after errors"]
    for name in ("error", "error of build"):
        assert first[name] == "MemoryError: no memory for the variables"
        assert re.match(r"RuntimeError: .*0.*no memory for the variables", second[name])
    for name in ("refused", "refused by evaluate"):
        assert all("targets" in found[name] for found in (alone, first, second))
    assert not first["is built"]
