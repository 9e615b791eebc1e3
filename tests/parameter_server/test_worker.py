"""The worker and the server without Ray: shares of a batch against the gradient of the whole."""

import jax
import numpy as np
import optax
import pytest

import tnt_jax as tnt
from tnt_jax.parameter_server.coordinator import GlobalBatch
from tnt_jax.parameter_server.partition import plan_shards
from tnt_jax.parameter_server.server import Layout, Server, Snapshot, serve_optimizer
from tnt_jax.parameter_server.trainer import EpochSums
from tnt_jax.parameter_server.worker import Order, Worker, WorkerModel, make_counts
from tnt_jax.train.contracts import Batch

RNG = np.random.default_rng(0)


@pytest.fixture
def one_rank(use_ranks, monkeypatch):
    use_ranks(1)
    # A worker has the devices of its process.
    monkeypatch.setattr(jax, "local_devices", lambda **_: jax.devices()[:1])


def prepared(weight):
    """Returns a compiled model, a batch of 11 rows padded to 12, and a worker with servers."""
    module = tnt.models.TextClassifier(30, 3, embedding_dim=4, hidden_dims=(5,), dropout=0.4)
    model = tnt.Model(module, seed=3)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optax.sgd(0.5), loss=loss, metrics=["accuracy"])
    tokens, labels = RNG.integers(1, 30, (12, 6)), RNG.integers(0, 3, 12).astype(np.int32)
    mask = np.float32([1] * 11 + [0])
    batch = Batch(tokens, labels, None if weight is None else np.float32(weight), mask)
    model.evaluate(tokens, labels, batch_size=12, verbose=0)
    core = model._core
    state = jax.tree.map(np.asarray, core.trainer.state)
    leaves, structure = jax.tree.flatten(state.params)
    dtypes = tuple(x.dtype for x in leaves)
    plan = plan_shards([x.shape for x in leaves], dtypes, num_servers=2)
    optimizer = serve_optimizer(core.compilation.transformation, state.params, plan, name="sgd")
    layout = Layout(optimizer, structure, jax.tree.structure(state.model_state), dtypes)
    servers = [Server(number) for number in range(2)]
    for number, server in enumerate(servers):
        held = plan.packed(number, leaves)
        part = optimizer.state_on(number, state.opt_state)
        assert server.load(layout, Snapshot(0, held, part)) == 0
    worker = Worker()
    options, key = core.options.for_adapter(), np.asarray(state.key)
    worker.load(WorkerModel(module, options, tokens[:1], core.functions, layout, key, False))
    return core, state, batch, worker, servers


@pytest.mark.parametrize("weight", [None, np.linspace(0, 2, 12)], ids=["mask", "weights"])
@pytest.mark.parametrize(
    "num_shares",
    [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)],
)
def test_shares_of_a_batch_make_the_update_of_the_whole(one_rank, num_shares, weight):
    core, state, batch, worker, servers = prepared(weight)
    pulled = [server.pull() for server in servers]
    whole = worker.compute(Order(0, None, True, 11), batch, *pulled)
    counts = make_counts(core.step_parts(), core.trainer.runtime.mesh)

    def divisors(batch):
        return [np.asarray(x) for x in counts(state.params, state.model_state, batch)]

    works = GlobalBatch(batch, 0, 11).shares(num_shares, 1, divisors)
    parts = [worker.compute(*work.arguments, *pulled) for work in works]
    for server, pushes in enumerate(zip(*(part[1:] for part in parts), strict=True)):
        for index, grad in enumerate(whole[1 + server].grads):
            total = sum(push.grads[index] for push in pushes)
            np.testing.assert_allclose(total, grad, rtol=1e-5, atol=1e-7)
    sums, shared = EpochSums(None), EpochSums(None)
    sums.add([whole[0]])
    shared.add([part[0] for part in parts])
    for left, right in zip(jax.tree.leaves(shared.sums), jax.tree.leaves(sums.sums), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5)
    assert core.logs(shared.sums)["accuracy"] == core.logs(sums.sums)["accuracy"]


def test_servers_make_the_step_of_the_trainer(one_rank):
    core, state, batch, worker, servers = prepared(None)
    pulled = [server.pull() for server in servers]
    _, *pushes = worker.compute(Order(0, None, True, 11), batch, *pulled)
    for server, push in zip(servers, pushes, strict=True):
        assert server.update(0, None, True, push) == 1
    core.trainer.set_state(state)
    state, programs, group = core.trainer.state, core.trainer.programs, group_of(batch)
    sums = programs.zero_sums(group, state)
    trained, _ = programs.training(group, state, sums)(state, sums, batch)
    plan = servers[0]._layout.optimizer.plan
    arrays = plan.unpacked([server.pull() for server in servers])
    for array, leaf in zip(arrays, jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_array_equal(array, leaf)


def group_of(batch):
    from tnt_jax.train.execution import DeviceBatches

    return DeviceBatches(batch, 11)


def test_a_server_refuses_an_update_of_another_version(one_rank):
    *_, servers = prepared(None)
    with pytest.raises(Exception, match="Server 1 is at version 0, but was asked to change vers"):
        servers[1].update(4, None, True)
    assert servers[1].version(catch_up=4) == 0
    assert servers[1].version() == 4
