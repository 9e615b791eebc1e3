"""Parameter servers on a Ray cluster, beside `fit` in this process."""

import re
import time
from contextlib import nullcontext

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from pages import ROOT, fences
from ray_clusters import leave_cluster, ray_cluster_of
from warned import kept_warnings

import tnt_jax as tnt
from tnt_jax.parameter_server.server_group import Actors

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 40, (150, 8))
LABELS = (TOKENS[:, 0] % 3).astype(np.int32)
# Small enough for two servers and four workers on the cluster of the tests; and with one device
# each, whatever this process has.
SMALL = {
    "resources_per_worker": {"CPU": 0.5},
    "resources_per_server": {"CPU": 0.5},
    "worker_env": {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
}


@pytest.fixture(scope="session")
def devices_open():
    """Opens the devices before a cluster starts, without which there is one."""
    jax.devices()


@pytest.fixture
def connected(devices_open, ray_cluster):
    import ray

    ray.init(ray_cluster.address, log_to_driver=False)
    yield ray
    leave_cluster()


def make_model(optimizer="sgd", dropout=0.3):
    module = tnt.models.TextClassifier(40, 3, embedding_dim=8, hidden_dims=(9,), dropout=dropout)
    model = tnt.Model(module, seed=1)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


def fitted(model, epochs=2, **kwargs):
    return model.fit(TOKENS, LABELS, batch_size=32, epochs=epochs, verbose=0, **kwargs)


def assert_equal(model, other):
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def assert_close(model, other, tolerance=1e-5):
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


class Killing(tnt.callbacks.Callback):
    """Kills an actor after a batch, counted from the start of training."""

    def __init__(self, ray, choose, *, after):
        super().__init__()
        self._ray, self._choose, self._left = ray, choose, after

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left == 0:
            self._ray.kill(self._choose(), no_restart=True)


def test_one_worker_without_staleness_trains_like_fit_bit_for_bit(connected, use_ranks):
    use_ranks(1)
    adam = tnt.optimizers.Adam(0.01)
    reference, model = make_model(adam), make_model(adam)
    expected = fitted(reference, validation_data=(TOKENS[:50], LABELS[:50]))
    with tnt.ParameterServer(
        model, num_servers=2, num_workers=1, max_staleness=0, **SMALL
    ) as server:
        seen = []
        weights = tnt.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(model.get_weights()[0].sum())
        )
        history = fitted(server, validation_data=(TOKENS[:50], LABELS[:50]), callbacks=[weights])
        assert_equal(model, reference)
        assert len(set(seen)) == 10  # Callbacks read the servers' variables of each step.
        for name, values in expected.history.items():
            np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
        found = server.evaluate(TOKENS, LABELS, verbose=0)
        np.testing.assert_allclose(found, reference.evaluate(TOKENS, LABELS, verbose=0), rtol=1e-5)
        np.testing.assert_array_equal(
            server.predict(TOKENS, verbose=0), reference.predict(TOKENS, verbose=0)
        )
        # Going on, with what was trained elsewhere in between, and a step of one's own.
        fitted(model, epochs=1)
        fitted(server, epochs=1)
        fitted(reference, epochs=1)
        fitted(reference, epochs=1)
        assert_equal(model, reference)
        _check_own_step(server, model)
        with pytest.raises(RuntimeError, match=r"Worker 0 failed at the scheduled .*a pair"):
            server.fetch(server.schedule(lambda params: params))
    with pytest.raises(RuntimeError, match="was shut down"):
        fitted(server)


def test_random_numbers_of_evaluation_are_those_of_the_rows(connected, use_ranks):
    use_ranks(1)

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x) + jax.random.normal(self.make_rng("noise"), (len(x), 1))

    x, y = RNG.normal(size=(90, 4)).astype(np.float32), np.zeros((90, 1), np.float32)
    model = tnt.Model(Noisy())
    model.compile("sgd", loss="mse", metrics=["mae"])
    expected = model.evaluate(x, y, batch_size=16, verbose=0)
    outputs = model.predict(np.zeros_like(x), batch_size=16, verbose=0)
    assert len(np.unique(outputs)) == 90
    with tnt.ParameterServer(model, num_servers=1, num_workers=2, **SMALL) as server:
        found = server.evaluate(x, y, batch_size=16, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        np.testing.assert_array_equal(
            server.predict(np.zeros_like(x), batch_size=16, verbose=0), outputs
        )


@pytest.mark.parametrize("method", ["evaluate", pytest.param("predict", marks=pytest.mark.long)])
def test_a_callback_ends_evaluation_and_prediction(connected, use_ranks, method):
    use_ranks(1)

    class Stop(tnt.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 2

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = batch == 2

    x, y = RNG.normal(size=(160, 4)).astype(np.float32), np.zeros((160, 1), np.float32)
    data = (x, y) if method == "evaluate" else (x,)
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", loss="mse", metrics=["mae"])
    options = {"batch_size": 16, "verbose": 0}
    expected = getattr(model, method)(*[array[:48] for array in data], **options)
    with tnt.ParameterServer(model, num_servers=1, num_workers=2, **SMALL) as server:
        compute = getattr(server, method)
        np.testing.assert_allclose(compute(*data, **options, callbacks=[Stop()]), expected, 1e-6)
        # What was begun for the batches that follow does not matter to the next call.
        everything = getattr(model, method)(*data, **options)
        np.testing.assert_allclose(compute(*data, **options), everything, rtol=1e-6)


def _check_own_step(server, model):
    params = jax.tree.map(np.asarray, model.state.params)
    opt_state = model.state.opt_state

    def step(params, factor):
        return jax.tree.map(lambda x: factor * x, params), factor + 1

    values = [server.schedule(step, np.float32(factor)) for factor in (0.5, 2.0)]
    assert server.fetch(values) == [1.5, 3.0]
    server.join()
    transformation = model._core.compilation.transformation
    for factor in (0.5, 2.0):
        grads = jax.tree.map(lambda x, factor=factor: np.float32(factor) * x, params)
        updates, opt_state = transformation.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    for ours, theirs in zip(
        jax.tree.leaves(model.state.params), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.long
def test_a_sidecar_evaluates_the_variables_of_a_version_beside_training(connected, use_ranks):
    use_ranks(1)
    reference, model = make_model(), make_model()
    expected = fitted(reference, validation_data=(TOKENS[:50], LABELS[:50]))
    with tnt.ParameterServer(
        model, num_servers=1, num_workers=1, max_staleness=0, **SMALL
    ) as server:
        sidecar = server.sidecar(TOKENS[:50], LABELS[:50], batch_size=32, every=3)
        fitted(server, callbacks=[sidecar])
    assert sidecar.results[-1]["version"] == 10
    assert sidecar.results[-1]["loss"] == pytest.approx(expected.history["val_loss"][-1])


@pytest.mark.long
def test_synchronous_training_is_that_of_as_many_ranks_whatever_dies(connected, use_ranks, capsys):
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.3, momentum=0.9))
    use_ranks(2)
    reference = make_model(optimizer)
    fitted(reference)
    use_ranks(1)
    model, disturbed = make_model(optimizer), make_model(optimizer)
    partitioner = tnt.parameter_server.FixedShardsPartitioner(2)
    with tnt.ParameterServer(
        model, num_servers=2, num_workers=2, max_staleness=0, checkpoint_every=3,
        partitioner=partitioner, **SMALL,
    ) as server:  # fmt: skip
        fitted(server)
        assert_close(model, reference)
        assert server.statistics.staleness == {0: 20}
    with tnt.ParameterServer(
        disturbed, num_servers=2, num_workers=2, max_staleness=0, checkpoint_every=3,
        partitioner=partitioner, **SMALL,
    ) as server:  # fmt: skip
        actors = server._actors
        worker = Killing(connected, lambda: actors.workers[1], after=2)
        one_server = Killing(connected, lambda: actors.servers[0], after=7)
        fitted(server, callbacks=[worker, one_server])
        assert_equal(disturbed, model)
        assert server.statistics.lost_workers == server.statistics.lost_servers == 1
        assert server.statistics.redone_updates == 2
        assert server.statistics.lost_updates == 0
    said = capsys.readouterr().err
    assert "Worker 1 of the parameter server was lost" in said
    assert "All go back to version 5; 2 update(s) are made again" in said


@pytest.mark.long
def test_a_lost_server_loses_at_most_the_updates_of_an_interval(connected, use_ranks, capsys):
    use_ranks(1)
    model = make_model(dropout=0.0)
    with tnt.ParameterServer(
        model, num_servers=2, num_workers=2, checkpoint_every=4, compression="bfloat16", **SMALL
    ) as server:
        actors = server._actors
        killing = Killing(connected, lambda: actors.servers[1], after=11)
        history = fitted(server, epochs=4, callbacks=[killing])
        statistics = server.statistics
        assert statistics.updates == 20
        assert statistics.examples == 600
        assert 1 <= statistics.lost_updates <= 4
        assert sum(statistics.staleness.values()) == 20
        assert max(statistics.staleness) >= 1
    message = f"starts again from its checkpoint of version 10: {statistics.lost_updates} update(s)"
    assert message in capsys.readouterr().err
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"max_staleness": 0}, {"max_staleness": 0, "backup_workers": 1}],
    ids=["synchronous", "backup worker"],
)
def test_four_workers_train_like_fit(connected, use_ranks, options):
    use_ranks(1)
    reference, model = make_model(), make_model()
    fitted(reference)
    with tnt.ParameterServer(model, num_servers=2, num_workers=4, **options, **SMALL) as server:
        fitted(server)
        assert server.statistics.examples == 300
    assert_close(model, reference)


@pytest.mark.long
@pytest.mark.parametrize("bound", [1, 2])
def test_staleness_stays_within_its_bound(connected, use_ranks, bound):
    use_ranks(1)
    model = make_model()
    with tnt.ParameterServer(
        model, num_servers=1, num_workers=4, max_staleness=bound, **SMALL
    ) as server:
        fitted(server, epochs=6)
        assert max(server.statistics.staleness) == bound
        assert server.statistics.updates == 30


@pytest.mark.long
def test_batch_statistics_are_those_of_as_many_ranks(connected, use_ranks):
    images, labels = RNG.normal(size=(48, 8, 8, 3)).astype(np.float32), RNG.integers(0, 10, 48)

    def trained(server_of):
        model = tnt.Model(tnt.models.ResNetSmall(), seed=2)
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss=loss)
        with server_of(model) as server:
            server.fit(images, labels, batch_size=16, epochs=1, verbose=0, shuffle=False)
        return model

    use_ranks(2)
    reference = trained(nullcontext)
    use_ranks(1)
    model = trained(
        lambda model: tnt.ParameterServer(
            model, num_servers=2, num_workers=2, max_staleness=0, **SMALL
        )
    )
    assert_close(model, reference)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nnx", "keras"])
def test_modules_that_hold_their_variables_are_trained(connected, use_ranks, kind):
    use_ranks(1)
    x, y = RNG.normal(size=(64, 6)).astype(np.float32), RNG.integers(0, 3, 64)

    def make():
        if kind == "keras":
            import keras

            keras.utils.set_random_seed(0)
            module = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(3)]
            )
        else:
            from flax import nnx

            rngs = nnx.Rngs(0)
            module = nnx.Sequential(
                nnx.Linear(6, 5, rngs=rngs), jax.nn.relu, nnx.Linear(5, 3, rngs=rngs)
            )
        model = tnt.Model(module)
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss=loss)
        return model

    reference, model = make(), make()
    reference.fit(x, y, batch_size=16, epochs=1, verbose=0)
    with tnt.ParameterServer(
        model, num_servers=1, num_workers=1, max_staleness=0, **SMALL
    ) as server:
        server.fit(x, y, batch_size=16, epochs=1, verbose=0)
    assert_equal(model, reference)
    np.testing.assert_array_equal(model.predict(x, verbose=0), reference.predict(x, verbose=0))


@pytest.mark.long
def test_the_page_runs(use_ranks):
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    use_ranks(1)
    names = {"x": TOKENS, "y": LABELS}
    with ray_cluster_of(num_cpus=8) as cluster, ray.init(cluster.address, log_to_driver=False):
        for kind, block in fences(ROOT / "docs/parameter_server.md"):
            assert kind == "python"
            exec(block, names)
    assert names["sidecar"].results[-1]["version"] > 4
    assert all(np.isfinite(value.fetch()) for value in names["losses"])


def test_a_cluster_without_room_says_at_once_and_at_the_end_what_is_missing(connected, use_ranks):
    use_ranks(1)
    lack = r"100 worker\(s\) need 102 CPU; of \d+ CPU in the cluster \d+ CPU are free"
    begun_at = time.monotonic()
    expected = f"no room within 4 s: .*{lack}. Start fewer"
    with kept_warnings() as texts, pytest.raises(RuntimeError, match=expected):
        tnt.ParameterServer(make_model(), num_workers=100, start_timeout_s=4)
    assert time.monotonic() - begun_at < 20
    assert re.search(f"Waiting up to 4 s for room on the Ray cluster: .*{lack}", texts[-1])


def test_who_stops_waiting_for_room_gives_its_place_in_the_queue_back(
    connected, use_ranks, monkeypatch
):
    def stop_waiting(self):
        raise KeyboardInterrupt

    use_ranks(1)
    monkeypatch.setattr(Actors, "_lack", stop_waiting)
    before = connected.util.placement_group_table()
    with pytest.raises(KeyboardInterrupt):
        tnt.ParameterServer(make_model(), num_workers=100)
    after = connected.util.placement_group_table()
    (made,) = after.keys() - before.keys()
    assert after[made]["state"] == "REMOVED"


def test_a_process_that_is_lost_before_it_starts_is_started_once_more(
    connected, use_ranks, monkeypatch, capsys
):
    use_ranks(1)
    start_server, start_worker = Actors.start_server, Actors.start_worker
    started = []

    def lost_at_first(start, name, times):
        def lost(actors, number):
            actor = start(actors, number)
            started.append(name)
            if started.count(name) <= times:
                connected.kill(actor)
            return actor

        return lost

    monkeypatch.setattr(Actors, "start_server", lost_at_first(start_server, "server", 1))
    monkeypatch.setattr(Actors, "start_worker", lost_at_first(start_worker, "worker", 1))
    model, reference = make_model(), make_model()
    fitted(reference)
    with tnt.ParameterServer(
        model, num_servers=1, num_workers=1, max_staleness=0, **SMALL
    ) as server:
        fitted(server)
    assert_equal(model, reference)
    said = capsys.readouterr().err
    assert "Server 0 was lost while it had no work" in said
    assert "Worker 0 was lost while it had no work" in said
    started.clear()
    monkeypatch.setattr(Actors, "start_worker", lost_at_first(start_worker, "worker", 2))
    with pytest.raises(RuntimeError, match="Worker 0 of the parameter server cannot start on its"):
        tnt.ParameterServer(make_model(), num_servers=1, num_workers=1, **SMALL)
    assert started == ["server", "worker"] * 2


@pytest.mark.long
def test_a_worker_that_sticks_is_replaced(connected, use_ranks):
    use_ranks(1)
    model, reference = make_model(), make_model()
    fitted(reference)
    with tnt.ParameterServer(
        model, num_servers=1, num_workers=1, max_staleness=0, worker_timeout_s=25, **SMALL
    ) as server:
        worker = server._actors.workers[0]
        stick = tnt.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: (
                worker.wait_for.remote(1e6) if batch == 2 else None
            )
        )
        fitted(server, callbacks=[stick])
        assert server.statistics.lost_workers == 1
    assert_equal(model, reference)


def test_scheduled_steps_are_in_the_model_once_all_have_ended(connected, use_ranks):
    use_ranks(1)
    x, y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    model = tnt.Model(nn.Dense(1, use_bias=False))
    model.compile(tnt.optimizers.SGD(0.1), loss="mse")
    model.evaluate(x, y, verbose=0)
    model.set_weights([np.zeros((2, 1), np.float32)])

    def ascent(params, value):  # Adds the learning rate to every weight.
        return jax.tree.map(lambda x: 0 * x - 1, params), value

    class Unreadable:
        def __reduce__(self):
            return int, ("five",)

    def assert_weights(expected):
        np.testing.assert_allclose(model.get_weights()[0].ravel(), expected, atol=1e-6)

    with tnt.ParameterServer(model, num_servers=1, num_workers=1, **SMALL) as server:
        assert [server.fetch(server.schedule(ascent, np.int32(n))) for n in range(3)] == [0, 1, 2]
        assert_weights(0.3)
        model.optimizer.learning_rate = 0.5  # The next step has it.
        assert server.schedule(ascent, np.int32(3)).fetch() == 3
        assert_weights(0.8)
        server.schedule(ascent, np.int32(4))
        server.schedule(lambda params: params)
        with pytest.raises(RuntimeError, match=r"failed at the scheduled .*a pair"):
            server.join()
        assert_weights(1.3)
        with pytest.raises(RuntimeError, match=r"failed at the scheduled ascent.*invalid literal"):
            server.fetch(server.schedule(ascent, Unreadable()))
        server.schedule(ascent, np.int32(5))
        # Whatever else is called waits for what is scheduled.
        assert server.evaluate(x, y, verbose=0) == pytest.approx((2 * 1.8 - 1) ** 2)
        assert_weights(1.8)


def test_processes_that_are_lost_between_two_calls_are_started_again(connected, use_ranks, capsys):
    use_ranks(1)
    reference, model = make_model(), make_model()
    with tnt.ParameterServer(
        model, num_servers=1, num_workers=1, max_staleness=0, **SMALL
    ) as server:
        for trained in (reference, server):
            fitted(trained, epochs=1)
        for actor in (server._actors.servers[0], server._actors.workers[0]):
            connected.kill(actor)
        # The workers get another loss, too.
        for compiled in (reference, model):
            loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
            compiled.compile(tnt.optimizers.SGD(0.1), loss=loss)
        for trained in (reference, server):
            fitted(trained, epochs=1)
    assert_equal(model, reference)
    said = capsys.readouterr().err
    assert "Server 0 was lost while it had no work" in said
    assert "Worker 0 was lost while it had no work" in said
