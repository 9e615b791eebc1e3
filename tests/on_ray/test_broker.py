"""The driver that holds nodes of a Ray cluster for the launcher."""

from types import SimpleNamespace

import pytest
from ray_clusters import leave_cluster, ray_cluster_of

from tnt_jax.on_ray import node
from tnt_jax.on_ray.broker import connect, open_doors, reserve


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
            assert [each.slots for each in held.nodes] == [1, 1]
            cluster.remove_node(lost, allow_graceful=False)
            assert open_doors(ray, held, ["true"]) is None
            held = reserve(ray, 2, fewest=1, use_gpus=False, tell=lambda text: None)
            doors = open_doors(ray, held, ["true"])
            assert doors is not None
            assert len(doors) == 1
        finally:
            ray.cloudpickle.unregister_pickle_by_value(node)
            leave_cluster()
