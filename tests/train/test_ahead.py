"""The step is compiled ahead, in a thread: once, with the same results, and whatever happens then."""

import signal
import threading
from collections import Counter

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import tnt_jax as tnt
from tnt_jax.data.layout import RankSlice
from tnt_jax.data.sources import ArraySource, announced_batch
from tnt_jax.distributed.liveness import phases
from tnt_jax.keras_compat.fit.fit_loop import FitLoop
from tnt_jax.train import compiled_steps

X = np.random.default_rng(0).normal(size=(44, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Net(nn.Module):
    """A network of this file alone, so that no other test has compiled its step."""

    width: int = 4
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(1)(nn.Dropout(self.rate, deterministic=not train)(x))


class CannotTrain(nn.Module):
    """A network with an error that no check before the step runs into."""

    @nn.compact
    def __call__(self, x, train=False):
        if train and x.shape[0] > 4:
            raise RuntimeError("no training of 8 rows")
        return nn.Dense(1)(x)


@pytest.fixture
def compiled():
    """Counts the programs of training steps that are compiled, by the thread that does so."""
    found = Counter()

    def note(event, seconds, **about):
        if event == _COMPILED and about.get("fun_name") in ("jit(step)", "jit(steps)"):
            found[threading.current_thread().name.rpartition("_")[0] or "main"] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def make_model(module=None, *, steps_per_execution=1, on_nan=None, **options):
    model = tnt.Model(module or Net(), **options)
    model.compile(
        optax.sgd(0.1, momentum=0.9), loss="mse",
        steps_per_execution=steps_per_execution, on_nan=on_nan,
    )  # fmt: skip
    return model


def fit(model, *, data=None, epochs=1, **options):
    x, y = (X[:40], Y[:40]) if data is None else (data, None)
    sizes = {"batch_size": 8} if data is None else {}
    model.fit(x, y, epochs=epochs, verbose=0, shuffle=False, **sizes, **options)
    return model.get_weights()


def batches():
    return [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {"data": True}),
        (4, {"on_nan": "skip", "steps_per_execution": 5}),
        (2, {"shard_optimizer_state": True}),
        (4, {"mesh": {"data": 2, "fsdp": 2}}),
    ],
)
def test_the_step_is_compiled_once_in_the_thread_and_has_the_same_bits(
    use_ranks, compiled, monkeypatch, num_ranks, options
):
    use_ranks(num_ranks)
    options = dict(options)
    data = batches() if options.pop("data", False) else None
    weights = fit(make_model(Net(rate=0.2), **options), data=data)
    assert compiled == {"tnt_jax-compile": 1}
    monkeypatch.setattr(FitLoop, "trains", False)
    expected = fit(make_model(Net(rate=0.2), **options), data=data)
    assert compiled == {"tnt_jax-compile": 1, "main": 1}
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_batch_of_another_shape_is_compiled_by_its_own_step(use_ranks, compiled):
    use_ranks(1)
    model = make_model()
    model.fit(X, Y, batch_size=8, verbose=0)
    assert compiled == {"tnt_jax-compile": 1, "main": 1}
    model.fit(X, Y, batch_size=11, verbose=0)
    assert compiled == {"tnt_jax-compile": 1, "main": 2}


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        (4, {"steps_per_execution": 2}),
        (2, {"shard_optimizer_state": True}),
        (4, {"mesh": {"data": 2, "fsdp": 2}}),
    ],
)
def test_evaluation_is_compiled_once_in_the_thread_and_has_the_same_bits(
    use_ranks, compiled, monkeypatch, num_ranks, options
):
    def history():
        model, held_out = make_model(**options), (X[8:40], Y[8:40])
        x, y = X[:32], Y[:32]
        history = model.fit(x, y, 8, epochs=2, verbose=0, shuffle=False, validation_data=held_out)
        return history.history

    use_ranks(num_ranks)
    found = history()
    assert compiled == {"tnt_jax-compile": 2}
    monkeypatch.setattr(FitLoop, "trains", False)
    assert history() == found
    assert compiled == {"tnt_jax-compile": 2, "main": 2}


def test_evaluation_is_compiled_beside_training_and_validation_waits_for_it(
    use_ranks, compiled, monkeypatch
):
    use_ranks(1)
    compile_it, here = compiled_steps._compile, phases.here()
    seen, is_trained = [], threading.Event()

    def wait_and_compile(lowered):
        if seen:
            # The second program is that of evaluation: training does not wait for it.
            assert is_trained.wait(60)
            assert any(
                here.doing[0] == "compile" or threading.Event().wait(0.01) for _ in range(6000)
            )
        seen.append(lowered)
        compile_it(lowered)

    class Told(tnt.callbacks.Callback):
        def on_test_begin(self, logs=None):
            is_trained.set()

    monkeypatch.setattr(compiled_steps, "_compile", wait_and_compile)
    model = make_model()
    fit(model, validation_data=(X[:40], Y[:40]), callbacks=[Told()])
    assert compiled == {"tnt_jax-compile": 2}
    fit(model, validation_data=(X[:40], Y[:40]))
    assert len(seen) == 2


def test_no_evaluation_is_compiled_ahead_that_never_comes(use_ranks, compiled):
    use_ranks(1)
    fit(make_model(), epochs=2, validation_data=(X[:40], Y[:40]), validation_freq=3)
    tnt.shutdown()  # Waits for the compiler.
    assert compiled == {"tnt_jax-compile": 1}


def test_evaluation_of_announced_data_is_compiled_before_any_is_read(use_ranks, compiled):
    use_ranks(1)
    seen = []

    def on_read():
        # No batch comes before both programs are compiled.
        for _ in range(6000):
            if compiled["tnt_jax-compile"] == 2:
                break
            threading.Event().wait(0.01)
        seen.append(dict(compiled))

    fit(make_model(), validation_data=Announced(Y[:40], on_read=on_read))
    assert seen[0] == {"tnt_jax-compile": 2}
    assert compiled == {"tnt_jax-compile": 2}
    # What was announced wrongly is compiled again, by the evaluation itself.
    model = make_model(Net(width=5))
    fit(model, validation_data=Announced(Y[:40], like=Y[:6]))
    assert compiled == {"tnt_jax-compile": 4, "main": 1}


def test_nothing_is_compiled_ahead_for_no_step_or_for_steps_of_several_programs(
    use_ranks, compiled
):
    use_ranks(1)
    fit(make_model(), epochs=3, initial_epoch=3)
    fit(make_model(reproducible=True, virtual_ranks=1))
    assert "tnt_jax-compile" not in compiled


def test_an_error_of_the_model_is_that_of_the_step(use_ranks, compiled, monkeypatch):
    use_ranks(1)
    with pytest.raises(RuntimeError, match="no training of 8 rows") as found:
        fit(make_model(CannotTrain()))
    monkeypatch.setattr(FitLoop, "trains", False)
    with pytest.raises(RuntimeError) as expected:
        fit(make_model(CannotTrain()))
    assert str(found.value) == str(expected.value)
    assert not compiled


def test_what_the_compiler_raises_in_the_thread_the_step_finds_itself(
    use_ranks, compiled, monkeypatch, caplog, capsys
):
    use_ranks(1)

    def fail(lowered):
        raise MemoryError("no memory to compile")

    monkeypatch.setattr(compiled_steps, "_compile", fail)
    with caplog.at_level("DEBUG", logger="tnt_jax"):
        fit(make_model())
    assert "not compiled ahead: no memory to compile" in capsys.readouterr().err
    assert compiled == {"main": 1}


class _Held:
    """A compiler that begins only when told, and the notes of the process until then."""

    def __init__(self, monkeypatch):
        self.may_begin, self.phases = threading.Event(), []
        compile_it, here = compiled_steps._compile, phases.here()

        def wait_and_compile(lowered):
            # The main thread has come to its step once it says that it compiles.
            while not self.may_begin.wait(0.01):
                self.phases.append(here.doing[0])
                if self.phases[-1] == "compile":
                    self.on_wait()
            compile_it(lowered)

        self.on_wait = self.may_begin.set
        monkeypatch.setattr(compiled_steps, "_compile", wait_and_compile)


def test_a_process_that_waits_for_the_compiler_says_that_it_compiles(
    use_ranks, compiled, monkeypatch
):
    use_ranks(1)
    held = _Held(monkeypatch)
    fit(make_model())
    assert held.phases[-1] == "compile"
    assert compiled == {"tnt_jax-compile": 1}


@pytest.fixture
def interruptible():
    """Lets SIGINT interrupt this process, which may have been started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_ends_the_wait_and_another_fit_compiles_nothing_again(
    use_ranks, compiled, monkeypatch, interruptible
):
    use_ranks(1)
    held, model = _Held(monkeypatch), make_model()
    main = threading.main_thread().ident
    held.on_wait = lambda: (signal.pthread_kill(main, signal.SIGINT), held.may_begin.wait(0.2))
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    assert not compiled
    held.may_begin.set()
    fit(model)
    assert compiled == {"tnt_jax-compile": 1}


def test_shutdown_waits_for_the_compiler(use_ranks, compiled, monkeypatch):
    use_ranks(1)
    held, model = _Held(monkeypatch), make_model()

    class Stop(tnt.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        fit(model, callbacks=[Stop()])
    assert not compiled
    threading.Timer(0.1, held.may_begin.set).start()
    tnt.shutdown()
    assert compiled == {"tnt_jax-compile": 1}


class Announced(ArraySource):
    """Batches that say beforehand what they are like, and are read when `on_read` returns."""

    in_memory = False

    def __init__(self, targets=Y, *, like=Y, on_read=lambda: None):
        rank_slice = RankSlice(tnt.get_size(), 0, tnt.get_size())
        super().__init__((X[: len(targets)], targets), global_batch_size=8, rank_slice=rank_slice)
        rows = (X[:0], like[:0])
        self.announce = lambda: announced_batch(rows, rank_slice, 8, len(like))
        self.on_read = on_read

    def batches(self, epoch, start_batch=0):
        self.on_read()
        yield from super().batches(epoch, start_batch)


def without_ahead(monkeypatch, source):
    with monkeypatch.context() as patch:
        patch.setattr(FitLoop, "trains", False)
        return fit(make_model(), data=source)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_step_is_compiled_while_the_first_batch_is_read(
    use_ranks, compiled, monkeypatch, num_ranks
):
    use_ranks(num_ranks)
    is_compiled, compile_it = threading.Event(), compiled_steps._compile

    def compile_and_tell(lowered):
        compile_it(lowered)
        is_compiled.set()

    monkeypatch.setattr(compiled_steps, "_compile", compile_and_tell)
    reads = []
    # The first batch does not come before the step is compiled.
    source = Announced(on_read=lambda: reads.append(is_compiled.wait(60)))
    weights = fit(make_model(), data=source)
    assert reads == [True]
    # The last batch of 4 rows has a program of its own.
    assert compiled == {"tnt_jax-compile": 1, "main": 1}
    for one, other in zip(weights, without_ahead(monkeypatch, Announced()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_data_that_fails_meanwhile_raises_its_error_and_can_be_read_again(use_ranks, compiled):
    use_ranks(1)
    model, errors = make_model(), [OSError("disk is gone")]

    def fail_once():
        if errors:
            raise errors.pop()

    source = Announced(Y[:40], on_read=fail_once)
    with pytest.raises(OSError, match="disk is gone"):
        fit(model, data=source)
    fit(model, data=source)
    assert compiled == {"tnt_jax-compile": 1}


@pytest.mark.parametrize(
    ("targets", "like"),
    [
        (Y[:40], Y[:6]),  # Fewer rows are announced.
        (Y[:40], np.zeros((40, 3), np.int32)),
        (Y[:5], Y),
    ],
)
def test_what_was_announced_decides_nothing(use_ranks, monkeypatch, targets, like):
    use_ranks(2)
    weights = fit(make_model(), data=Announced(targets, like=like))
    for one, other in zip(weights, without_ahead(monkeypatch, Announced(targets)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_error_of_the_model_does_not_wait_for_the_data(use_ranks):
    use_ranks(1)

    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise RuntimeError("no such layer")

    is_over = threading.Event()
    try:
        with pytest.raises(RuntimeError, match="no such layer"):
            fit(make_model(Broken()), data=Announced(on_read=is_over.wait))
    finally:
        is_over.set()
