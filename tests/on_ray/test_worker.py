"""What a process learns from Ray's modules, without a cluster; `test_ray_train.py` has real ones."""

import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tnt_jax.cluster import clusters
from tnt_jax.cluster.clusters import detect_job
from tnt_jax.on_ray import worker
from tnt_jax.on_ray.worker import role, train_worker


class Context:
    """What `ray.train.get_context` returns in a worker."""

    __module__ = "ray.train.v2.api.context"

    def __init__(self, rank, size):
        self.get_world_rank = lambda: rank
        self.get_world_size = lambda: size
        self.get_local_rank = lambda: 0
        self.get_experiment_name = lambda: "run-7"


@pytest.fixture
def in_worker(monkeypatch):
    """Returns a function that makes this process a worker of Ray Train, and collects broadcasts."""

    def enter(rank, size, *, told=None):
        train = ModuleType("ray.train")
        train.get_context = lambda: Context(rank, size)
        monkeypatch.setitem(sys.modules, "ray.train", train)
        said = []
        monkeypatch.setattr(clusters, "broadcast", lambda value: said.append(value) or told)
        monkeypatch.setattr(clusters, "node_address", lambda: "10.0.0.5")
        clusters._agreed.cache_clear()
        return said

    yield enter
    clusters._agreed.cache_clear()


def test_a_process_that_has_not_loaded_ray_is_no_worker(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    assert role() is None
    assert train_worker() is None
    assert "ray" not in sys.modules


def test_worker_0_chooses_an_address_at_which_it_can_listen(in_worker):
    said = in_worker(0, 4, told=("10.0.0.5:4711", b"secret"))
    job = detect_job({})
    assert (job.num_processes, job.process_id, job.source) == (4, 0, "Ray Train")
    assert job.coordinator_address == "10.0.0.5:4711"
    ((address, secret),) = said
    assert len(secret) == 32
    host, port = address.split(":")
    assert host == "10.0.0.5"
    with socket.socket() as listener:
        listener.bind(("", int(port)))


def test_the_others_take_the_address_that_worker_0_says(in_worker):
    said = in_worker(3, 4, told=("10.0.0.9:4711", b"secret"))
    job = detect_job({})
    assert (job.process_id, job.coordinator_address) == (3, "10.0.0.9:4711")
    assert clusters.train_secret() == b"secret"
    assert said == [None]


def test_a_worker_asks_the_others_once_in_its_life(in_worker):
    said = in_worker(1, 2, told=("10.0.0.9:4711", b"secret"))
    assert detect_job({}) == detect_job({})
    assert len(said) == 1


INHERITED = {
    "TNT_COORDINATOR_ADDRESS": "a:1", "TNT_NUM_PROCESSES": "9", "TNT_PROCESS_ID": "8",
    "SLURM_JOB_ID": "1", "SLURM_PROCID": "0",
}  # fmt: skip


def test_what_started_ray_does_not_count_in_its_workers(in_worker):
    in_worker(1, 2, told=("10.0.0.9:4711", b"secret"))
    assert detect_job(INHERITED).num_processes == 2


def test_a_single_worker_trains_alone_wherever_ray_was_started(in_worker):
    said = in_worker(0, 1)
    assert detect_job(INHERITED) is None
    assert said == []


def test_a_trial_trains_alone_wherever_ray_was_started(monkeypatch):
    tune = SimpleNamespace(_in_tune_session=lambda: True)
    monkeypatch.setitem(sys.modules, "ray.tune.trainable.trainable_fn_utils", tune)
    monkeypatch.delitem(sys.modules, "ray.train", raising=False)
    assert detect_job(INHERITED) is None


@pytest.mark.parametrize("error", [RuntimeError("outside"), DeprecationWarning("in a trial")])
def test_a_process_in_which_ray_says_so_is_no_worker(in_worker, monkeypatch, error):
    in_worker(0, 2)

    def refuse():
        raise error

    monkeypatch.setattr(sys.modules["ray.train"], "get_context", refuse)
    tune = SimpleNamespace(_in_tune_session=lambda: isinstance(error, DeprecationWarning))
    monkeypatch.setitem(sys.modules, "ray.tune.trainable.trainable_fn_utils", tune)
    assert worker.train_worker() is None
    assert role() == ("trial" if isinstance(error, DeprecationWarning) else None)


def test_the_first_version_of_ray_train_which_describes_a_worker_everywhere_is_not_asked(
    in_worker, monkeypatch
):
    in_worker(0, 2)
    monkeypatch.setattr(Context, "__module__", "ray.train.context")
    assert train_worker() is None
