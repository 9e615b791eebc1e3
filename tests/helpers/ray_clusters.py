"""Real Ray clusters on this machine, each with ports and a folder of its own."""

import gc
import os
import shutil
import tempfile
import time
from contextlib import contextmanager

import pytest

from tnt_jax.launch.processtree import processes_of_jobs


@contextmanager
def ray_cluster_of(*, num_cpus=4, **head_node_args):
    """Starts a cluster of one node, in which this process is no driver; yields the `Cluster`.

    `add_node` and `remove_node` of what is yielded change it; `address` is for `ray.init` and
    `RAY_ADDRESS`.
    """
    # Sockets are in this folder, and their paths must be shorter than 108 characters. Ray also notes
    # there which cluster runs on this machine.
    folder = tempfile.mkdtemp(prefix="tnt-ray-", dir="/tmp")
    os.makedirs(f"{folder}/ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # By default Ray's workers leave the cores to whatever else runs, such as other tests.
        patch.setenv("RAY_worker_niceness", "0")
        # By default Ray starts a worker for each CPU, whether it is used or not.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        # Its processes, which inherit this environment, have one device each.
        patch.delenv("XLA_FLAGS", raising=False)
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": num_cpus,
                "object_store_memory": 200_000_000,
                "include_dashboard": False,
                "include_log_monitor": False,
                **head_node_args,
            },
        )
        try:
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def leave_cluster():
    """Disconnects this process, and leaves nothing behind that would connect it again.

    A pass over data that an error ended tells Ray so when it is collected; if no cluster is
    connected then, Ray starts one.
    """
    import ray

    gc.collect()
    ray.shutdown()


def own_cluster(cluster):
    """Returns the environment of a job that looks at its own cluster alone, as `runtime_env`.

    Ray Train asks the latest cluster of the machine whether a run is alive, unless it is told which
    one to ask; another one says no, and it frees the places of the run.
    """
    return {"env_vars": {"RAY_ADDRESS": cluster.address}}


def await_nothing_left(address, job_id):
    """Waits until no process of a job of the launcher, which is on this machine, no actor and no
    placement group is left on a cluster; fails if one is.
    """
    import ray

    deadline = time.monotonic() + 40
    with ray.init(address, log_to_driver=False, logging_level="ERROR"):
        while left := _what_is_left(ray, job_id):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


def _what_is_left(ray, job_id):
    found = ray._private.state.actors().values()
    actors = [a for a in found if a["State"] != "DEAD" and a["ActorClassName"] == "Program"]
    groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    processes = [pid for pid, job in processes_of_jobs() if job == job_id]
    return [*processes, *actors, *groups]
