"""Steps that are not finite leave no trace in the state, alike on all ranks, in every kind of step."""

import json
from functools import partial

import jax
import numpy as np
import optax
import pytest
from bad_numbers import NAN_ROW, Net, batches, compiled, fit, leaves, rows
from processes import SCRIPTS, launch
from warned import kept_warnings

import tnt_jax as tnt
from tnt_jax.train.finite import CHECKED
from tnt_jax.train.health import number_watch
from tnt_jax.train.health.number_watch import MOST_SKIPPED, LossSpikes, NumberWatch

KINDS = {
    "plain": {},
    "several in a program": {"steps_per_execution": 3},
    "accumulated": {"optimizer": lambda: tnt.optimizers.Adam(0.01, gradient_accumulation_steps=2)},
    "sharded": {"shard_optimizer_state": True},
    "compressed": {"gradient_compression": "bfloat16"},
    "buckets by rank": {"fusion_threshold": 0},
    "reproducible": {"reproducible": True, "virtual_ranks": 4},
}


def has_same_bits(first, second):
    pairs = zip(leaves(first), leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


# The kinds of steps share the code that leaves a step out: two of them show nearly the same.
SHORT = ("plain", "accumulated")
ALL = [
    kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("plain", 1),
        ("sharded", 2),
        *(pytest.param(kind, 2, marks=pytest.mark.long) for kind in KINDS if kind != "sharded"),
        pytest.param("plain", 4, marks=pytest.mark.long),
    ],
)
def test_without_bad_numbers_the_bits_are_those_without_on_nan(use_ranks, kind, num_ranks):
    use_ranks(num_ranks)
    x, y = rows(40)
    states = [fit(x, y, on_nan=on_nan, **KINDS[kind])[0].state for on_nan in (None, "skip")]
    assert has_same_bits(*states)


@pytest.mark.parametrize("kind", ALL)
def test_a_skipped_step_is_as_if_its_batch_had_not_been_there(use_ranks, kind):
    use_ranks(2)
    x, y = rows(48)
    x[NAN_ROW] = np.nan  # In the third of six batches, in the rows of one rank.
    model, history = fit(x, y, on_nan="skip", **KINDS[kind])
    without = np.delete(x, range(16, 24), 0), np.delete(y, range(16, 24), 0)
    expected, logs = fit(*without, on_nan="skip", **KINDS[kind])
    assert has_same_bits(model.state, expected.state)
    assert history.pop("skipped_steps") == [1, 1]
    assert logs.pop("skipped_steps") == [0, 0]
    assert history == logs


@pytest.mark.long
def test_training_that_takes_the_step_is_lost(use_ranks):
    use_ranks(2)
    x, y = rows(48)
    x[NAN_ROW] = np.nan
    model, history = fit(x, y, on_nan=None)
    assert np.isnan(history["loss"]).all()
    assert "skipped_steps" not in history
    assert any(np.isnan(leaf).any() for leaf in leaves(model.state.params))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "plain" else pytest.mark.long) for kind in KINDS],
)
def test_raise_names_the_step_and_its_rows_and_keeps_the_weights_before_it(use_ranks, kind):
    use_ranks(2)
    x, y = rows(48)
    expected, _ = fit(x[:16], y[:16], on_nan="raise", epochs=1, **KINDS[kind])
    x[NAN_ROW] = np.inf
    model = compiled(on_nan="raise", **KINDS[kind])
    with pytest.raises(FloatingPointError, match="Step 3 of epoch 1 is not finite") as caught:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert "in row 3 of the global batch of 8" in str(caught.value)
    assert "gradient of " in str(caught.value)
    assert has_same_bits(model.state, expected.state)


@pytest.mark.long
def test_raise_tells_bad_losses_from_bad_data(use_ranks):
    use_ranks(2)
    x, y = rows(16)
    y[13] = -1.0

    def logarithm(true, pred):  # Of a negative number for one row.
        return jax.numpy.log(true[:, 0]) - pred[:, 0]

    model = tnt.Model(Net())
    model.compile("sgd", loss=logarithm, on_nan="raise")
    with pytest.raises(FloatingPointError, match="Step 2 of epoch 1") as caught:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert "The data are finite; the loss of row 5 of the global batch of 8 is not" in str(
        caught.value
    )


@pytest.mark.long
def test_a_bad_gradient_is_found_where_the_loss_is_finite(use_ranks):
    use_ranks(2)
    x, y = rows(16)

    def root(true, pred):  # Its derivative is infinite where it is 0: in the first step.
        return jax.numpy.sqrt(0 * pred[:, 0])

    model = tnt.Model(Net())
    model.compile("sgd", loss=root, on_nan="skip")
    before = leaves(model_params(model, x))
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    assert history["skipped_steps"] == [2]
    assert np.isnan(history["loss"][0]), "no step counts"
    assert all(map(np.array_equal, leaves(model.state.params), before))


def model_params(model, x):
    model.build(x[:2])
    return jax.tree.map(np.array, model.state.params)


@pytest.mark.long
def test_large_finite_gradients_are_taken(use_ranks):
    use_ranks(2)
    x, y = rows(16)
    x[:] = 1e17  # Gradients of 1e34 and more, in a sum of rows and of ranks.
    model, history = fit(
        x, y, on_nan="skip", optimizer=lambda: optax.sgd(1e-36), net=Net(plain=True), epochs=1
    )
    assert history["skipped_steps"] == [0]
    assert np.isfinite(leaves(model.state.params)[0]).all()


@pytest.mark.parametrize("num_steps", [1, pytest.param(2, marks=pytest.mark.long)])
def test_rollback_returns_to_the_epochs_beginning_and_goes_on_behind(use_ranks, num_steps):
    use_ranks(2)
    x, y = rows(80)
    x[NAN_ROW] = np.nan
    model, history = fit(x, y, on_nan="rollback", epochs=1, steps_per_execution=num_steps)
    # Step 3 is read when four more programs were started.
    first = {1: 56, 2: 80}[num_steps]
    assert history["skipped_steps"] == [first / 8]
    if first < 80:
        expected, logs = fit(x[first:], y[first:], on_nan="rollback", epochs=1)
        assert history["loss"] == logs["loss"]
        assert has_same_bits(model.state, expected.state)
    else:
        assert int(model.state.step) == 0


class Ending(tnt.callbacks.Callback):
    """Ends training by an error after a step."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 13:
            raise InterruptedError


@pytest.mark.parametrize("between", ["a resumed run", "another copy"])
def test_steps_that_rollback_undid_before_are_counted_on(use_ranks, tmp_path, monkeypatch, between):
    use_ranks(2)
    x, y = rows(8 * 30)
    x[[8 * 2, 8 * 24]] = np.nan
    callbacks, plain = [], {"on_nan": "rollback", "epochs": 1, "net": Net(plain=True)}
    if between == "another copy":
        monkeypatch.setattr(number_watch, "COPY_STEPS", 10)
    else:
        callbacks = [tnt.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=12)]
        with pytest.raises(InterruptedError):
            fit(x, y, callbacks=[*callbacks, Ending()], **plain)
    model, history = fit(x, y, callbacks=callbacks, **plain)
    assert 0 < int(model.state.step) < 30 - 7
    assert history["skipped_steps"] == [30 - int(model.state.step)]


@pytest.mark.long
def test_rollback_ends_where_it_does_not_help(use_ranks):
    use_ranks(2)
    x, y = rows(16)
    x[:] = np.nan
    with pytest.raises(FloatingPointError, match=r"Two epochs in a row .* of epoch 2"):
        fit(x, y, on_nan="rollback", epochs=9)
    x, y = rows(8 * 30)
    x[:] = np.nan
    with pytest.raises(
        FloatingPointError, match=r"went back 3 times already\. Step \d+ of epoch 1"
    ):
        fit(x, y, on_nan="rollback", epochs=9)


@pytest.mark.parametrize(("bad_row", "is_lost"), [(43, True), (3, False)])
def test_rollback_that_undoes_every_step_is_not_silent(use_ranks, bad_row, is_lost):
    use_ranks(2)
    x, y = rows(64)
    x[bad_row] = np.nan
    run = partial(fit, x, y, on_nan="rollback", epochs=3, net=Net(plain=True))
    if not is_lost:
        # Later steps of the epoch are kept.
        _, history = run()
        assert max(history["skipped_steps"]) < 8
        return
    lost = pytest.raises(FloatingPointError, match=r"Two epochs in a row were lost.* of epoch 2")
    with kept_warnings() as texts, lost:
        run()
    told = [text for text in texts if "has undone every step of epoch 1, which changed no" in text]
    assert len(told) == 1


@pytest.mark.long
def test_skipping_ends_where_every_step_is_skipped(use_ranks):
    use_ranks(2)
    x, y = rows(8 * 30)
    x[:] = np.nan
    with pytest.raises(FloatingPointError, match=f"{MOST_SKIPPED} steps in a row .* of epoch 4"):
        fit(x, y, on_nan="skip", epochs=9)


@pytest.mark.parametrize(("on_nan", "in_a_row"), [("skip", 5), ("rollback", 0)])
def test_steps_skipped_in_a_row_are_counted_on_from_a_saved_position(use_ranks, on_nan, in_a_row):
    mesh = use_ranks(2).mesh
    watch = NumberWatch(on_nan, None, mesh)
    sums = watch.restored({}, np.array([5, np.nan, 7], np.float32))
    np.testing.assert_array_equal(sums[CHECKED], [in_a_row, 0, 7])


def test_steps_that_were_skipped_are_steps_that_were_run(use_ranks):
    use_ranks(2)
    x, y = rows(40)
    x[NAN_ROW] = np.nan
    model, _ = fit(x, y, on_nan="skip", epochs=1, net=Net(plain=True))
    assert (int(model.state.step), model._shared.progress.num_steps) == (4, 5)


@pytest.mark.long
def test_a_scale_of_the_loss_that_adapts_itself_still_does(use_ranks):
    use_ranks(2)
    x, y = rows(48)

    def kind():
        return tnt.optimizers.LossScaleOptimizer(tnt.optimizers.SGD(0.01), initial_scale=2.0**126)

    models = [fit(x, y, on_nan=on_nan, optimizer=kind)[0] for on_nan in (None, "skip")]
    assert has_same_bits(*(model.state for model in models))
    assert float(models[1].state.opt_state.scale) < 2.0**126


@pytest.mark.long
def test_no_collective_is_added(use_ranks):
    use_ranks(2)
    for kind in ("plain", "accumulated", "sharded"):
        counts = []
        for on_nan in (None, "skip", "raise"):
            model, _ = fit(*rows(8), on_nan=on_nan, epochs=1, **KINDS[kind])
            text = model._trainer.lower_train_step(next(batches())).as_text()
            counts.append(
                (text.count("stablehlo.all_reduce"), text.count("stablehlo.reduce_scatter"))
            )
            assert ("is_finite" in text) == (on_nan is not None)
        assert counts[0] == counts[1] == counts[2], kind


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="on_nan must be None, 'raise', 'skip' or 'rollback'"):
        tnt.Model(Net()).compile("sgd", loss="mse", on_nan="ignore")


@pytest.mark.long  # Two ranks, above, decide alike.
@pytest.mark.multiprocess
def test_two_processes_decide_alike(tmp_path):
    helpers = str(SCRIPTS.parent / "helpers")
    done = launch(2, SCRIPTS / "train_bad_numbers.py", tmp_path, PYTHONPATH=helpers)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    assert first == second
    assert first["skip"] == first["without"]
    assert "Step 3 of epoch 1 is not finite" in first["raise"][1]
    assert "in row 6 of the global batch of 8" in first["raise"][1]


@pytest.mark.long
def test_no_position_behind_a_bad_step_is_saved(use_ranks, tmp_path):
    use_ranks(2)
    x, y = rows(80)
    x[NAN_ROW] = np.nan
    backup = tnt.callbacks.BackupAndRestore(tmp_path, save_freq=4)
    with pytest.raises(FloatingPointError, match="Step 3 of epoch 1"):
        fit(x, y, on_nan="raise", callbacks=[backup])
    assert not list(tmp_path.glob("tnt_jax_backup*"))


def test_a_loss_far_above_those_before_is_told_once(caplog):
    spikes = LossSpikes()
    losses = 2 + 0.1 * np.random.default_rng(0).normal(size=64)
    for step, loss in enumerate([*losses, 2.4, np.nan, 9.0, 8.0, 2.0, 7.5], start=1):
        spikes.see(float(loss), step)
    told = [record.message for record in caplog.records]
    assert [text.split(" of epoch")[0] for text in told] == [
        "The loss of step 67", "The loss of step 70",
    ]  # fmt: skip
    assert f"is 9, far above the median {np.median(losses):.4g} of the 64 losses" in told[0]


def test_losses_that_hardly_change_have_no_spikes(caplog):
    spikes = LossSpikes()
    for step in range(200):
        spikes.see(1.0 + 0.1 * (step % 2), step)
    assert not caplog.records


def test_the_memory_of_the_copy_of_rollback_counts(use_ranks, monkeypatch):
    use_ranks(2)
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "1GB")
    needed = {}
    for on_nan in ("skip", "rollback"):
        model = compiled(on_nan=on_nan)
        model.fit(*rows(16), batch_size=8, verbose=0, tnt_micro_batch_size="auto")
        needed[on_nan] = model._core.memory_choice.chosen.nbytes
    copy = sum(x.nbytes for x in jax.tree.leaves(model.state))
    assert needed["rollback"] - needed["skip"] == pytest.approx(copy, abs=64)
