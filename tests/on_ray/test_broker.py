"""The driver that holds nodes of a Ray cluster for the launcher."""

from types import SimpleNamespace

import pytest
from ray_clusters import leave_cluster, ray_cluster_of

from tnt_jax.on_ray import node
from tnt_jax.on_ray.broker import Node, _Door, connect, open_doors, reserve


def test_the_reason_why_ray_cannot_connect_is_told():
    def init(**_):
        cause = RuntimeError("Traceback:\n  ...\nAuthenticationError: use a token")
        raise ConnectionError("Failed to connect to Ray cluster at nowhere:1") from cause

    reason = r"Cannot connect to the Ray cluster at auto: AuthenticationError: use a token$"
    with pytest.raises(ConnectionError, match=reason):
        connect(SimpleNamespace(init=init), "auto", pytest.fail)


def test_who_has_been_given_up_gets_nothing_of_the_program_that_follows():
    program = node.Program()
    first = program.start(["sh", "-c", "echo one; read -r line"], {})
    assert program.read(first, "output") == b"one\n"
    second = program.start(["sh", "-c", "echo two"], {})
    assert program.read(first, "output") == b""
    assert program.wait(first) == 1
    assert program.read(second, "output") == b"two\n"
    assert program.wait(second) == 0


class LostActor(Exception):
    pass


class Cluster:
    """Stands for Ray: the first actors are lost, and `nodes` are those of two bundles after that."""

    exceptions = SimpleNamespace(RayActorError=LostActor)

    def __init__(self, *nodes):
        table = {"bundles_to_node_id": {str(index): node for index, node in enumerate(nodes)}}
        self.util = SimpleNamespace(placement_group_table=lambda group: table)
        self.num_made, self.starts = 0, []
        self.kind = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.make))

    def make(self):
        self.num_made += 1
        answer = LostActor() if self.num_made == 1 else ""
        asks = SimpleNamespace(remote=lambda: answer)
        starts = SimpleNamespace(remote=lambda *words: self.starts.append(words) or 1)
        return SimpleNamespace(visible_gpus=asks, start=starts)

    def get(self, value):
        answers = value if isinstance(value, list) else [value]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return value

    def door(self):
        return _Door(self, self.kind, ["supervise"], Node("a", [{}], [0, 1]), "the group")


def test_in_place_of_a_lost_node_a_program_starts_on_another_one():
    cluster = Cluster("b", "b")
    door = cluster.door()
    assert door.start(lambda: False) is None, "The launcher waits no longer."
    assert cluster.starts == []
    actor, number = door.start(lambda: True)
    assert (actor is not None, number) == (True, 1)
    assert cluster.starts == [(["supervise"], {})]
    assert cluster.num_made == 2


def test_nothing_starts_on_nodes_over_which_ray_has_spread_the_processes_of_one():
    cluster = Cluster("b", "c")
    door = cluster.door()
    for _ in range(2):  # The launcher tries again and again.
        with pytest.raises(RuntimeError, match="put its processes on several nodes"):
            door.start(lambda: True)
    assert cluster.starts == []


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_node_that_is_lost_before_its_actor_has_started_is_not_waited_for():
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    small = {"num_cpus": 1, "object_store_memory": 100_000_000}
    with ray_cluster_of(num_cpus=0) as cluster:
        cluster.add_node(**small)
        lost = cluster.add_node(**small)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            held = reserve(ray, 2, fewest=1, use_gpus=False, tell=pytest.fail)
            assert [each.bundles for each in held.nodes] == [[0], [1]]
            cluster.remove_node(lost, allow_graceful=False)
            assert open_doors(ray, held, ["true"]) is None
            held = reserve(ray, 2, fewest=1, use_gpus=False, tell=lambda text: None)
            doors = open_doors(ray, held, ["true"])
            assert doors is not None
            assert len(doors) == 1
        finally:
            ray.cloudpickle.unregister_pickle_by_value(node)
            leave_cluster()
