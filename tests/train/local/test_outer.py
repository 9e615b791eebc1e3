"""What becomes of outer updates when a group is lost: two groups in one process, against NumPy."""

from collections import deque

import jax
import numpy as np
import optax
import pytest
from local_runs import rounded

import tnt_jax as tnt
from tnt_jax.train.local import outer as module
from tnt_jax.train.local.groups import Group, LocalSteps
from tnt_jax.train.local.outer import OuterUpdates

RNG = np.random.default_rng(0)
START = {"a": RNG.normal(size=(3, 5)), "b": RNG.normal(size=7)}


class Wires:
    """Connections of the groups that fail while `is_broken`."""

    def __init__(self):
        self.boxes, self.is_broken = [], False

    def __call__(self, members, what):
        own = deque()
        self.boxes.append(own)
        return _Links(self, own)


class _Links:
    def __init__(self, wires, own):
        self._wires, self._own, self.sent_bytes = wires, own, 0

    def post(self, make):
        self._own.append(make())

    def take(self):
        """Returns the oldest message of each group that this one has not taken."""
        if self._wires.is_broken:
            raise ConnectionError("broken")
        self.taken = getattr(self, "taken", -1) + 1
        return [box[self.taken] for box in self._wires.boxes]

    def close(self):
        pass


@pytest.fixture
def make_groups(monkeypatch):
    """Returns a function that makes two groups of an elastic job, and their connections."""

    def make(**options):
        wires = Wires()
        monkeypatch.setattr(module, "Links", wires)
        monkeypatch.setattr(module, "link", object)
        mesh = tnt.init(devices=[0]).mesh
        options = {"outer": optax.sgd(1.0)} | options
        sync = LocalSteps(every=4, groups="process", **options)
        params = {path: jax.numpy.asarray(x, jax.numpy.float32) for path, x in START.items()}
        groups = [
            OuterUpdates(Group(index, ((0,), (0,)), mesh), sync, params, {}) for index in (0, 1)
        ]
        return groups, wires

    tnt.shutdown()
    yield make
    tnt.shutdown()


def moved(params, seed):
    rng = np.random.default_rng(seed)
    return {path: x - rng.normal(size=x.shape).astype("f4") for path, x in params.items()}


def steps(outer, params, first, last, *, rows=1):
    """Takes steps of a group that do not change its weights."""
    for step in range(first, last + 1):
        has_turn = outer.has_turn(rows)
        assert outer.num_steps == step
        if has_turn:
            params, _ = outer.exchange(params, {})
    return params


def test_what_is_taken_back_travels_with_the_next_turn(make_groups):
    groups, _ = make_groups(delay=3, compress="int8")
    own = [moved(outer.params, seed) for seed, outer in enumerate(groups)]
    for outer, params in zip(groups, own, strict=True):
        steps(outer, params, 1, 5)
        before = {f"residual/{path}": np.zeros_like(x) for path, x in START.items()}
        outer.recall()
        found = outer.own_arrays()
        assert found["rows/0"] == 5
        for path, x in before.items():
            np.testing.assert_array_equal(found[path], x)
        assert len(outer.shared_arrays()["under_way"]) == 0


@pytest.mark.parametrize(
    ("options", "lacks"),
    [
        ({"outer": optax.sgd(1.0, momentum=0.5)}, "outer/0/0/trace/a"),
        ({"compress": "int8"}, "residual/a"),
    ],
)
def test_state_of_other_local_steps_is_refused(make_groups, options, lacks):
    (saved, _), _ = make_groups()
    (found, _), _ = make_groups(**options)
    with pytest.raises(ValueError, match=f"lacks '{lacks}'.* Pass the outer optimizer, fragments"):
        found.restore(saved.own_arrays(), saved.shared_arrays())


def test_a_group_that_missed_an_update_takes_it_from_another(make_groups):
    groups, wires = make_groups(compress="int8")
    own = [moved(outer.params, seed) for seed, outer in enumerate(groups)]
    for outer, params in zip(groups, own, strict=True):
        steps(outer, params, 1, 3)
    # Both send, and the second one loses the connection before it has received.
    wires.is_broken = True
    for outer, params in zip(groups, own, strict=True):
        with pytest.raises(ConnectionError):
            steps(outer, params, 4, 4)
    wires.is_broken = False
    first, second = groups
    first_own, _ = first.close(own[0], {})
    assert (first.updates, second.updates) == ([1], [0])
    second.recall()
    shared = jax.device_get(first.shared_arrays())
    second_own, _ = second.follow(shared, first.updates, own[1], {})
    start = {path: np.asarray(x, np.float32) for path, x in START.items()}
    for path, x in start.items():
        sent = [rounded(x - np.asarray(params[path])) for params in own]
        np.testing.assert_allclose(first.params[path], x - np.mean(sent, axis=0), atol=1e-6)
        for found in (second.params[path], first_own[path], second_own[path]):
            np.testing.assert_array_equal(found, first.params[path])
    assert second.own_arrays()["rows/0"] == 0
    assert second.updates == [1]


def test_a_failed_exchange_changes_nothing(make_groups):
    groups, wires = make_groups(compress="int8")
    params = moved(groups[0].params, 0)
    steps(groups[0], params, 1, 3)
    wires.is_broken = True
    kept = jax.device_get((groups[0].own_arrays(), groups[0].shared_arrays()))
    with pytest.raises(ConnectionError), groups[0].undone_by_errors():
        steps(groups[0], params, 4, 4)
    found = jax.device_get((groups[0].own_arrays(), groups[0].shared_arrays()))
    for before, after in zip(kept, found, strict=True):
        assert sorted(before) == sorted(after)
        for path, x in before.items():
            np.testing.assert_array_equal(after[path], x, err_msg=path)


@pytest.mark.parametrize(
    ("change", "sync", "differing"),
    [
        (lambda params: params, {"outer": optax.sgd(0.5)}, set()),
        (lambda params: params, {"every": 9, "compress": "int8"}, {"every", "compress"}),
        (lambda params: params | {"b": params["b"] + 1}, {}, {"params/b"}),
        (lambda params: params | {"b": params["b"].astype("f4")}, {}, {"params/b"}),
        (lambda params: {"a": params["a"]}, {}, {"params/b"}),
    ],
)
def test_a_custom_loop_begins_with_the_same_on_every_process(change, sync, differing, monkeypatch):
    told = []
    monkeypatch.setattr(module, "compare", lambda call, values, advice: told.append(values))
    tnt.local_steps(START, LocalSteps())
    tnt.local_steps(change(START), LocalSteps(**sync))
    own, other = (set(values.items()) for values in told)
    assert {name for name, _ in own ^ other} == differing
