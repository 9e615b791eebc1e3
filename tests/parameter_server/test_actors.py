"""Which processes a parameter server ends, and when it shuts Ray down."""

from types import SimpleNamespace

import pytest

from tnt_jax.parameter_server import server_group
from tnt_jax.parameter_server.coordinator import SidecarEvaluation
from tnt_jax.parameter_server.server_group import Actors


class FakeRay:
    """Knows whether it runs, and which actors were killed."""

    def __init__(self):
        self.runs, self.killed = False, []
        self.util = SimpleNamespace(remove_placement_group=lambda group: None)

    def is_initialized(self):
        return self.runs

    def init(self, **options):
        self.runs = True

    def shutdown(self):
        self.runs = False

    def kill(self, actor, *, no_restart):
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(server_group, "import_ray", lambda what: fake)
    monkeypatch.setattr(Actors, "_take_places", lambda self: None)
    monkeypatch.setattr(Actors, "_await_processes", lambda self: [1])
    monkeypatch.setattr(
        Actors,
        "_remote",
        lambda self, kind, env, *, bundle=None: SimpleNamespace(
            remote=lambda *args: (kind.__name__, bundle)
        ),
    )
    return fake


def make_actors():
    return Actors(
        num_servers=1,
        num_workers=1,
        resources_per_server={},
        resources_per_worker={},
        worker_env={},
        start_timeout_s=1,
    )


def test_the_last_parameter_server_shuts_down_the_ray_that_the_first_has_started(ray):
    first, second, third = (make_actors() for _ in range(3))
    for closed in (first, first, third):
        closed.close()
        assert ray.runs
    second.close()
    assert not ray.runs


def test_ray_of_the_user_goes_on(ray):
    ray.init()
    first, second = make_actors(), make_actors()
    first.close()
    second.close()
    assert ray.runs


def test_the_process_of_a_sidecar_ends_though_training_fails(ray):
    class Sidecar:
        load = evaluate = SimpleNamespace(remote=lambda *args: None)

    actors = make_actors()
    actors._remote = lambda kind, env: SimpleNamespace(remote=Sidecar)
    ray.put, ray.wait = (lambda value: value), (lambda refs, timeout: ([], refs))
    servers = SimpleNamespace(version=0, pull=list)
    coordinator = SimpleNamespace(actors=actors, servers=servers, model=None)
    sidecar = SidecarEvaluation(None, coordinator, [], every=1)
    for _ in range(2):  # Each training ends before its end is told.
        sidecar.on_train_begin()
        servers.version += 1
        sidecar.on_train_batch_end(0)
    assert [type(actor) for actor in ray.killed] == [Sidecar]
    actors.close()
    assert sum(type(actor) is Sidecar for actor in set(ray.killed)) == 2
