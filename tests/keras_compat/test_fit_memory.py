"""`tnt_micro_batch_size="auto"` computes as many rows at once as fit, with the same result."""

import logging
import re
from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from training import assert_close

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax.data.feed import BATCHES_AHEAD
from tnt_jax.train import memory_choice, trainer
from tnt_jax.train.contracts import Batch, LossTerm, Measured
from tnt_jax.train.execution import IN_FLIGHT
from tnt_jax.train.state import create_state
from tnt_jax.train.steps.micro_batches import in_passes, why_in_one_pass

ROWS, WIDTH = 61, 16


class Net(nn.Module):
    """Dropout, so that rows must keep their random numbers."""

    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(3):
            x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(5)(x)


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, axis_name="data")(nn.Dense(64)(x))
        return nn.Dense(5)(nn.relu(x))


class OwnStatistics(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x))
        return nn.Dense(5)(nn.relu(x))


class Contrastive(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        z = nn.Dense(16)(x)
        return (z @ z.T).sum(-1, keepdims=True) * nn.Dense(5)(x)


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, 5, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))


def of_keras():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((WIDTH,)),
            keras.layers.Dense(64, "relu", kernel_regularizer="l2"),
            keras.layers.Dropout(0.3, seed=1),
            keras.layers.Dense(5),
        ]
    )


MODULES = {"linen": Net, "nnx": lambda: OfNnx(nnx.Rngs(0)), "keras": of_keras}


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return x, x[:, :5], rng.uniform(size=ROWS).astype(np.float32)


def make_model(module, **options):
    model = tnt.Model(module, seed=3, **options)
    model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
    return model


def train(model, micro, rows=48, **arguments):
    """Trains with batches of one shape, or with all rows, of which 13 are in the last batch."""
    x, y, weight = (array[:rows] for array in data())
    options = {"batch_size": 24, "epochs": 2, "verbose": 0, **arguments}
    return model.fit(x, y, sample_weight=weight, tnt_micro_batch_size=micro, **options).history


@cache
def of_one_pass(make):
    """Returns the history of training by steps of all rows on one device."""
    tnt.shutdown()
    tnt.init(devices=range(1))
    return train(make_model(make()), None)


@cache
def calls_of_one_pass(kind):
    """Returns what `fit` with validation leaves on one device, and what the calls after it return,
    of all rows at once.
    """
    tnt.shutdown()
    tnt.init(devices=range(1))
    return results_of_calls(make_model(MODULES[kind]()), None)


def results_of_calls(model, micro):
    x, y, _ = data()
    validation = {"validation_data": (x, y), "validation_batch_size": ROWS}
    history = train(model, micro, ROWS, **validation)
    options = {"batch_size": ROWS, "verbose": 0, "tnt_micro_batch_size": micro}
    evaluated, predicted = model.evaluate(x, y, **options), model.predict(x, **options)
    return history, model.get_weights(), evaluated, predicted


@pytest.fixture
def few_rows(monkeypatch):
    """Lets steps compute at most so many rows at once, whatever the memory."""

    def let(most):
        def choose(asked, ways, limit, **options):
            way = next(iter(ways))
            assert way.num_rows is not None
            assert way.why_whole() is None
            way.program(most)
            attempt = memory_choice.Attempt("few", 0, True, most)
            return memory_choice.Choice(asked, ((attempt,),), limit)

        monkeypatch.setattr(memory_choice, "choose", choose)

    return let


# Each kind of model, and each number of ranks and of rows.
@pytest.mark.parametrize(
    ("kind", "num_ranks", "most"),
    [
        ("linen", 4, 1),
        ("nnx", 1, 5),
        ("keras", 4, 1),
        pytest.param("linen", 1, 5, marks=pytest.mark.long),
        pytest.param("nnx", 4, 1, marks=pytest.mark.long),
        pytest.param("keras", 1, 5, marks=pytest.mark.long),
        *(
            pytest.param(kind, *rows, marks=pytest.mark.long)
            for kind in MODULES
            for rows in ((2, 4), (1, 1))
        ),
    ],
)
def test_passes_give_what_one_pass_gives(use_ranks, few_rows, kind, num_ranks, most):
    expected = calls_of_one_pass(kind)
    few_rows(most)
    use_ranks(num_ranks)
    model = make_model(MODULES[kind]())
    assert_close(results_of_calls(model, "auto"), expected)
    assert model._core.at_once.training <= most


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(32)(x)))
        return {"a": nn.Dense(5)(x), "b": nn.Dense(1)(x)}


def objective(params, batch, rngs, apply):
    """The squares of outputs, each row by its weight."""
    return (apply(params, batch.inputs) ** 2).mean(-1)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param(
            TwoHeads,
            {
                "optimizer": lambda: tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2),
                "loss": {"a": "mse", "b": "mae"},
                "loss_weights": {"a": 0.3, "b": 2.0},
            },
            id="accumulation of two losses",
        ),
        pytest.param(
            Net,
            {"steps_per_execution": 2, "on_nan": "skip"},
            id="two steps a program, left if not finite",
        ),
        pytest.param(
            Net,
            {
                "optimizer": lambda: tnt.optimizers.LossScaleOptimizer(tnt.optimizers.SGD(0.1)),
                "objective": objective,
                "loss": None,
            },
            id="loss scale of an objective",
        ),
    ],
)
def test_options_of_compile_meet_passes(use_ranks, few_rows, module, options):
    x, y, weight = (array[:48] for array in data())
    targets = {"a": y, "b": x[:, :1]} if module is TwoHeads else y
    found = []
    for num_ranks, most in ((1, None), (2, 5)):
        if most:
            few_rows(most)
        use_ranks(num_ranks)
        model = tnt.Model(module(), seed=3)
        chosen = {"optimizer": lambda: tnt.optimizers.SGD(0.1), "loss": "mse", **options}
        model.compile(**{**chosen, "optimizer": chosen["optimizer"]()})
        history = model.fit(
            x, targets, sample_weight=weight, batch_size=16, epochs=2, verbose=0,
            tnt_micro_batch_size=most and "auto",
        )  # fmt: skip
        found.append((history.history, model.get_weights()))
    assert model._core.at_once.training == 5
    assert_close(found[1], found[0])


def test_the_compiler_decides_by_the_memory_of_a_device(use_ranks, monkeypatch, caplog):
    """The step is measured as it runs, and less memory means fewer rows at once."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, WIDTH)).astype(np.float32)
    y, rows, histories, compiled = x[:, :5], [], [], []
    for memory in (None, "3MiB", "1500KiB"):
        if memory:
            monkeypatch.setenv("TNT_DEVICE_MEMORY", memory)
        use_ranks(2)
        monkeypatch.setattr(logging.getLogger("tnt_jax"), "propagate", True)
        model = make_model(Net())
        with caplog.at_level(logging.INFO, "tnt_jax"):
            history = model.fit(
                x, y, batch_size=4096, epochs=1, verbose=0, tnt_micro_batch_size="auto"
            )
        rows.append(model._core.at_once.training)
        histories.append(history.history)
        compiled.append(model._core.memory_choice.num_compiled)
        limit = model._core.memory_choice.limit
        chosen = model._core.memory_choice.attempts[-1][-1].nbytes
        assert chosen <= limit
        # The batches that wait, of which each device has half, are counted; one is in the program.
        trainer = model._core.trainer
        program = _jax.ProgramMemory.of(trainer.lower_train_step(Batch(x, y)).compile())
        waiting = (x.nbytes + y.nbytes) // 2
        assert chosen - program.most_bytes(0) >= 5 * waiting
        assert trainer.most_in_flight == 0
    assert compiled[:2] == [1, 1]
    assert rows[0] is None
    assert 1 < rows[2] < rows[1] < 2048
    assert_close(histories[1], histories[0])
    assert_close(histories[2], histories[0])
    said = [record.message for record in caplog.records if "chose" in record.message]
    assert len(said) == 3
    assert "chose one pass, which needs" in said[0]
    assert f"passes of {rows[1]} rows, which needs" in said[1]
    assert "too much: one pass needs about" in said[1]
    # Passes compute what one pass computes, and the rows that round them.
    passes = re.findall(r"(\d+) passes of (\d+) rows[^(]*\(time ([\d.]+)\)", "".join(said))
    assert len(passes) >= 2
    assert all(time == f"{int(count) * int(part) / 2048:.2f}" for count, part, time in passes)
    needed = float(re.search(r"one pass, which needs ([\d.]+) MiB", said[0])[1])
    estimates = re.findall(r"one pass needs about ([\d.]+) MiB \(time 1\.00\)", "".join(said))
    assert [float(estimate) for estimate in estimates] == pytest.approx(2 * [needed], rel=0.05)


def test_passes_of_evaluation_and_prediction_need_less_memory(use_ranks, monkeypatch):
    """The compiler states it for the program that runs: all rows at once do not fit."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, WIDTH)).astype(np.float32)
    y = x[:, :5]
    use_ranks(1)
    whole = make_model(Net())
    evaluated = whole.evaluate(x, y, batch_size=4096, verbose=0)
    predicted = whole.predict(x, batch_size=4096, verbose=0)
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "1500KiB")
    use_ranks(1)
    model = make_model(Net())
    options = {"batch_size": 4096, "verbose": 0, "tnt_micro_batch_size": "auto"}
    assert_close(model.evaluate(x, y, **options), evaluated)
    assert model._core.at_once.evaluation < 4096
    assert_close(model.predict(x, **options), predicted)
    assert model._core.at_once.evaluation < 4096
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "100KB")
    use_ranks(1)
    with pytest.raises(ValueError, match=r"evaluate\(tnt_micro_batch_size=\"auto\"\) found no way"):
        make_model(Net()).evaluate(x, y, **options)


@pytest.mark.parametrize(
    ("module", "memory", "reason"),
    [
        pytest.param(Normalized, "14KB", "communicates with other ranks", id="BatchNorm"),
        pytest.param(OwnStatistics, "14KB", "keeps statistics of a batch", id="of own rows"),
        pytest.param(Contrastive, "4KB", "compares rows of a batch", id="compares rows"),
    ],
)
def test_a_model_whose_batch_cannot_be_cut_says_why(use_ranks, monkeypatch, module, memory, reason):
    monkeypatch.setenv("TNT_DEVICE_MEMORY", memory)
    use_ranks(2)
    with pytest.raises(ValueError, match=reason) as error:
        train(make_model(module()), "auto")
    assert "found no way to compute a step that fits the" in str(error.value)


class Odd:
    """Parts of a step whose penalty, or whose divisor, forbids passes."""

    rows_at_once = None

    def __init__(self, what):
        self.what = what

    def measure(self, params, model_state, batch, *, key, train):
        loss = jnp.sum(batch.inputs @ params)
        penalty = jnp.mean(batch.inputs) if self.what == "penalty" else jnp.sum(params)
        count = jnp.sum(params) if self.what == "divisor" else jnp.sum(batch.weight)
        return Measured([LossTerm(loss, count)], penalty, model_state, {})


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("neither", None),
        ("penalty", "The model adds losses that depend on the rows of a batch"),
        ("divisor", "The loss is divided by a number that the model computes"),
    ],
)
def test_what_forbids_passes_is_found_by_tracing(use_ranks, what, reason):
    use_ranks(2)
    state = create_state(jnp.ones((4, 1)), {}, optax.sgd(0.1), seed=0)
    batch = Batch(np.ones((6, 4), "f4"), weight=np.ones(6, "f4"))
    assert why_in_one_pass(Odd(what), state, batch, 3, tnt.init().mesh) == reason


def test_passes_whose_rows_are_rounded_equal_one_pass(use_ranks, few_rows):
    use_ranks(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, WIDTH)).astype(np.float32)

    def fit(micro):
        model = make_model(Net())
        options = {"batch_size": 300, "epochs": 2, "verbose": 0, "tnt_micro_batch_size": micro}
        return model.fit(x, x[:, :5], **options).history

    history = fit(None)
    few_rows(77)  # Passes of 76 rows, the last of 72; of the second batch those of 68 and 64.
    assert in_passes(300, 77).part_rows == 76
    assert in_passes(200, 77).part_rows == 68
    assert_close(fit("auto"), history)


class Fail(tnt.callbacks.Callback):
    """Replaces the program of the first step by one that finds no memory."""

    def __init__(self):
        super().__init__()
        self.rows_at_once = []

    def on_train_begin(self, logs=None):
        core = self.model._core

        def step(state, sums, batch):
            self.rows_at_once.append(core.at_once.training)
            jax.tree.map(lambda x: x.delete(), state)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

        core.trainer.programs.training = lambda *_: step


@contextmanager
def compiled_steps():
    """Notes the compilations of steps within the block."""
    compiled = []

    def note(event, seconds, **facts):
        if event.endswith("backend_compile_duration") and "step" in facts["fun_name"]:
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("chosen", [0, pytest.param(1, marks=pytest.mark.long), 2])
def test_the_program_that_was_compiled_for_the_choice_runs(use_ranks, monkeypatch, chosen):
    """Also if others were compiled after it, and if it rematerializes."""
    history = of_one_pass(Net)
    use_ranks(1)
    looked_at = []

    def choose(asked, ways, limit, **options):
        plain, saving = next(ways), next(ways)
        for way, rows in ((plain, 12), (saving, None), (saving, 8), (plain, 6)):
            nbytes = way.program(rows).compile().most_bytes(0)
            looked_at.append(memory_choice.Attempt(way.name, nbytes, rows_at_once=rows))
        attempts = [(looked_at[0],), (looked_at[chosen],)]
        return memory_choice.Choice(asked, tuple(attempts[: 1 + (chosen > 0)]), limit)

    monkeypatch.setattr(memory_choice, "choose", choose)
    model = make_model(Net())
    with compiled_steps() as compiled:
        found = train(model, "auto")
    assert_close(found, history)
    assert len(compiled) == len(looked_at) == 4, "A program was compiled twice."
    assert model._core.at_once.training == looked_at[chosen].rows_at_once == [12, None, 8][chosen]
    assert (model._core._used.remat == "full") == (chosen > 0)


def test_a_program_that_fails_and_has_taken_the_state_gets_it_back(use_ranks, few_rows):
    history = of_one_pass(Net)
    few_rows(12)
    use_ranks(1)
    model, fail = make_model(Net()), Fail()
    assert_close(train(model, "auto", callbacks=[fail]), history)
    assert fail.rows_at_once == [12]
    assert model._core.at_once.training == 6


def test_a_program_is_not_tried_on_a_device_that_states_too_little_memory(
    use_ranks, monkeypatch, capfd
):
    history = of_one_pass(Net)
    use_ranks(1)
    asked = []

    def lack(devices, nbytes):
        asked.append(nbytes)
        return len(asked) < 3

    monkeypatch.setattr(memory_choice, "_free_bytes", lambda device, own=0: 2**30)
    monkeypatch.setattr(memory_choice, "_lack", lack)
    with compiled_steps() as compiled:
        found = train(make_model(Net()), "auto")
    assert_close(found, history)
    assert capfd.readouterr().err.count("A device has no memory") == 2
    assert len(asked) == len(compiled) == 3, "A program was compiled twice."


@pytest.mark.parametrize("saves", ["full", "never"])
def test_a_step_that_finds_no_memory_for_one_row_gives_way_to_another(
    use_ranks, monkeypatch, capfd, saves
):
    history = of_one_pass(Net)
    use_ranks(1)
    model, rows = make_model(Net()), []

    def first_run(start, **options):
        def failing():
            if model._core._used.remat == saves:
                return start()
            rows.append(model._core.at_once.training)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

        return memory_choice.first_run(failing, **options)

    monkeypatch.setattr(trainer, "first_run", first_run)
    if saves == "never":
        with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
            train(model, "auto")
        assert rows == 2 * [None, 12, 6, 3, 1]  # As it is, and with blocks computed twice.
    else:
        assert_close(train(model, "auto"), history)
        assert rows == [None, 12, 6, 3, 1]
        assert "although the compiler stated that it fits: remat='full'" in capfd.readouterr().err


def test_a_step_of_all_rows_that_finds_no_memory_on_one_device_fails(use_ranks):
    use_ranks(1)
    model = make_model(Normalized(), remat="full")
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        train(model, "auto", callbacks=[Fail()])


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_step_of_all_rows_that_finds_no_memory_gives_way_to_another(use_ranks, capfd, remat):
    history = of_one_pass(Normalized)
    use_ranks(4)
    model = make_model(Normalized(), remat=remat)
    assert_close(train(model, "auto", callbacks=[Fail()]), history)
    name = {"none": "remat='full'", "full": "shard_optimizer_state"}[remat]
    assert f"although the compiler stated that it fits: {name}" in capfd.readouterr().err
    assert model._core._used.remat == "full"
    assert model._core._used.shard_optimizer_state == (remat == "full")


def test_where_passes_do_not_suffice_state_is_sharded(use_ranks, monkeypatch):
    history = of_one_pass(Net)
    # Parameters, momentum and gradients are 38 KiB each.
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "128KiB")
    use_ranks(4)
    model = make_model(Net())
    assert_close(train(model, "auto"), history)
    *others, chosen = model._core.memory_choice.attempts
    assert others
    name = chosen[-1].name
    # One or the other: with `fsdp` the optimizer state is sharded by itself.
    assert ("fsdp" in name) != ("shard_optimizer_state" in name)
    # What was chosen for these devices is no option of the user's.
    assert model._core.options == make_model(Net())._core.options


def test_a_choice_is_made_once_for_each_shape(use_ranks, few_rows, monkeypatch):
    few_rows(4)
    use_ranks(2)
    model = make_model(Net())
    train(model, "auto", ROWS, epochs=1)
    monkeypatch.setattr(memory_choice, "choose", None)
    train(model, "auto", ROWS, epochs=2, initial_epoch=1)


def comparing(params, batch, rngs, apply):
    """Each row's outputs times those of all rows."""
    outputs = apply(params, batch.inputs)
    return (outputs @ outputs.T).mean(-1)


def test_passes_of_a_loss_are_not_those_of_the_next(use_ranks, few_rows):
    """The next one may compare rows."""
    use_ranks(1)
    few_rows(5)
    found = []
    for micro in ("auto", None):
        model = make_model(Net())
        train(model, micro)
        assert model._core.at_once.training == (5 if micro else None)
        model.compile(tnt.optimizers.SGD(0.01), objective=comparing)
        assert not model._core.cares_for_rows
        train(model, None)
        assert model._core.at_once.training is None
        found.append(model.get_weights())
    assert_close(*found)


def test_a_step_that_fits_nowhere_leaves_the_model_as_it_was(use_ranks, monkeypatch):
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "60KB")
    use_ranks(2)
    model = make_model(Net())
    for _ in range(2):
        with pytest.raises(ValueError, match="found no way to compute a step"):
            train(model, "auto")
    assert model._core.at_once.training is None
    assert train(model, None)["loss"]


def test_a_mesh_and_passes_are_chosen_together(use_ranks, monkeypatch):
    history = of_one_pass(Net)
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "118KiB")
    use_ranks(4)
    model = make_model(Net(), mesh="auto")
    assert_close(train(model, "auto"), history)
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "30KB")
    use_ranks(4)
    model = make_model(Net(), mesh="auto")
    with pytest.raises(ValueError, match="found no way to compute a step"):
        train(model, "auto")
    assert model._core.has_open_mesh


def test_a_pipeline_decides_the_rows_itself(use_ranks):
    use_ranks(2)
    pipeline = tnt.Pipeline("layers", microbatches=2)
    with pytest.raises(ValueError, match="micro-batches, smaller ones with more of them"):
        train(make_model(Net(), mesh={"stage": 2}, pipeline=pipeline), "auto")


# Activations and gradients far exceed the state.
class Reproducible(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x @ jnp.eye(64)), None), x, length=20)
        return nn.Dense(5)(x)


def test_reproducible_steps_keep_their_bits(use_ranks, monkeypatch):
    x, y, _ = data()
    x, y = np.tile(x, (9, 1))[:512], np.tile(y, (9, 1))[:512]
    options = {"batch_size": 512, "verbose": 0}
    auto = options | {"tnt_micro_batch_size": "auto"}

    def new_model(virtual_ranks=4):
        return make_model(Reproducible(), reproducible=True, virtual_ranks=virtual_ranks)

    use_ranks(1)
    whole = new_model()
    whole.fit(x, y, **options)
    weights, evaluated = whole.get_weights(), whole.evaluate(x, y, **options)
    predicted = whole.predict(x, **options)
    needs = {}
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        model = new_model()
        model.fit(x, y, **auto)
        jax.tree.map(np.testing.assert_array_equal, model.get_weights(), weights)
        np.testing.assert_array_equal(model.predict(x, **auto), predicted)
        assert model.evaluate(x, y, **auto) == evaluated
        chosen = model._core.memory_choice.chosen
        assert chosen.name == "one virtual rank at a time"
        needs[num_ranks] = chosen.nbytes
    # A chunk's activations, its gradients, parameters with momenta, and the batches that wait.
    params = sum(w.nbytes for w in model.get_weights())
    batches = (IN_FLIGHT + BATCHES_AHEAD) * 512 * (WIDTH + 5) * 4
    least = 20 * 128 * 64 * 4 + 3 * params + batches // 4
    assert least < needs[4] < 1.3 * least
    # With four chunks on a device, two sums wait for the last.
    assert needs[1] - needs[4] == 2 * params + 3 * batches // 4

    monkeypatch.setenv("TNT_DEVICE_MEMORY", f"{needs[4] - 1}B")
    use_ranks(4)
    with pytest.raises(ValueError, match="Use more virtual_ranks"):
        new_model().fit(x, y, **auto)
    new_model(virtual_ranks=8).fit(x, y, **auto)


@pytest.mark.parametrize("micro", ["Auto", "8"])
def test_other_words_are_refused(use_ranks, micro):
    use_ranks(1)
    expected = f"tnt_micro_batch_size must be a number of rows or 'auto', but is {micro!r}"
    with pytest.raises(ValueError, match=expected):
        train(make_model(Net()), micro)


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Conv(4, (3, 3))(x.reshape(-1, 4, 4, 1)))
        return nn.Dense(5)(x.mean((1, 2)))


class ConvolutionalBlocks(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(4):
            x = nn.relu(nn.Conv(8, (3, 3))(x))
        return nn.Dense(5)(x.mean((1, 2)))


def test_convolutions_take_passes(use_ranks, monkeypatch):
    use_ranks(1)
    x = np.random.default_rng(0).normal(size=(64, 16, 16, 8)).astype(np.float32)
    y, histories, names = x[:, :5, 0, 0], [], []
    for memory in ("1GiB", "7MiB"):
        monkeypatch.setenv("TNT_DEVICE_MEMORY", memory)
        use_ranks(1)
        model = make_model(ConvolutionalBlocks())
        with compiled_steps() as compiled:
            found = model.fit(
                x, y, batch_size=64, epochs=2, verbose=0,
                tnt_micro_batch_size="auto",
            )  # fmt: skip
        histories.append(found.history)
        choice = model._core.memory_choice
        names.append(choice.chosen.name)
        assert len(compiled) == choice.num_compiled
        assert choice.chosen.nbytes <= choice.limit
    assert names[0] == "one pass"
    assert " passes of " in names[1]
    assert_close(*histories)
    # XLA's CPU library takes a convolution within a loop in this form alone.
    text = model.lowered_text(x, y, batch_size=64)
    form = "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
    assert text.count("stablehlo.convolution") == text.count(form) > 8
    assert "stablehlo.while" in text


def test_several_processes_compute_fewer_rows_where_one_lacks_memory(use_ranks, monkeypatch):
    use_ranks(2)
    x, y, _ = data()
    options = {"batch_size": 8, "epochs": 1, "verbose": 0, "tnt_micro_batch_size": "auto"}
    whole = make_model(Convolutional()).fit(x[:32], y[:32], **options)
    monkeypatch.setattr("tnt_jax.train.memory_choice.process_count", lambda: 2)
    asked = []
    monkeypatch.setattr(
        "tnt_jax.train.memory_choice._find_memory",
        lambda devices, nbytes: asked.append(nbytes) or len(asked) > 1,
    )
    model = make_model(Convolutional())
    model.compile(
        tnt.optimizers.SGD(0.1, momentum=0.9),
        loss="mse",
        metrics=["mae"],
        steps_per_execution=4,
    )
    history = model.fit(x[:32], y[:32], **options)
    assert asked[0] > asked[1] > 0
    assert model._core.at_once.training == 2
    assert_close(history.history, whole.history)


def test_validation_takes_no_passes_of_its_own(use_ranks):
    use_ranks(1)
    with pytest.raises(TypeError, match="tnt_validation_micro_batch_size must be a whole number"):
        train(make_model(Net()), None, tnt_validation_micro_batch_size="auto")
