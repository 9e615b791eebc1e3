"""Eight virtual CPU devices for the tests' own process, set before JAX starts."""

import functools
import gc
import logging
import os
import sys
import tempfile
import warnings

import numpy as np
import pytest

from tnt_jax.files import UnsafeFolder, private_folder

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# The pool of threads has as many threads as cores by default; collectives of virtual devices
# deadlock below twice their number.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Many tests compile the same small programs, also in processes of their own.
try:
    _cache = private_folder(os.path.join(tempfile.gettempdir(), f"tnt_jax-tests-{os.getuid()}"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache)
except UnsafeFolder as error:
    warnings.warn(f"Nothing is cached between tests: {error}.", stacklevel=1)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# About half of the time goes into compiling programs that run once. LLVM's optimizations change no result but in
# the last bits; the fixture `all_optimizations` turns them on for tests of those, and
# JAX_DISABLE_MOST_OPTIMIZATIONS=0 for all tests.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# That two results are both NaN does not show that either is right.
np.testing.assert_allclose = functools.partial(np.testing.assert_allclose, equal_nan=False)


def pytest_xdist_auto_num_workers(config):
    """Chooses the workers of `-n auto`: one more than cores, as tests of several processes wait
    for them, as far as there are 4 GiB of memory for each.
    """
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)) + 1, int(memory_gib / 4)))


def pytest_collection_finish(session):
    """Spares the garbage collector what was imported, over and over."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def programs_of_this_file_alone():
    """Forgets what was compiled for the tests of a file, which no other file runs."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="module")
def all_optimizations():
    """Compiles as for users, for the tests of a file and in the processes that they start."""
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
        before = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def logger_that_caplog_sees(monkeypatch):
    """Lets `caplog` see the package's messages, which a test before, in the same process, may have
    sent to the screen alone.
    """
    monkeypatch.setattr(logging.getLogger("tnt_jax"), "propagate", True)


@pytest.fixture(autouse=True)
def numbers_of_this_test_alone(request, monkeypatch):
    """Starts the generator `RNG` of a test file anew, so that no test's data depend on the tests
    before it in this process.
    """
    if hasattr(request.module, "RNG"):
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(0))


@pytest.fixture
def use_ranks():
    """Returns a function that makes the first `num_ranks` devices the job, for this test, and
    returns the runtime.
    """
    import tnt_jax as tnt

    def use(num_ranks):
        tnt.shutdown()
        return tnt.init(devices=range(num_ranks))

    yield use
    tnt.shutdown()


@pytest.fixture(scope="session")
def ray_cluster():
    """Starts a Ray cluster of one node with 4 CPUs, for all tests of this process that use it.

    A test connects to `ray_cluster.address` and disconnects at its end. One that adds nodes removes
    them; one that kills the first starts a cluster of its own, with `ray_cluster_of`.
    """
    pytest.importorskip("ray", reason="needs the extra ray")
    import jax
    from ray_clusters import ray_cluster_of

    # While the cluster runs, the environment asks for no virtual devices.
    jax.local_devices()

    # It does not grow by itself.
    with ray_cluster_of(no_monitor=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray_data(ray_cluster):
    """Connects this process to the cluster, for the tests of a file; returns `ray.data`."""
    import ray
    from ray_clusters import leave_cluster

    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray.data
    leave_cluster()


@pytest.fixture
def two_ranks(use_ranks):
    """Makes the first two devices the job, for this test."""
    use_ranks(2)


@pytest.fixture
def four_ranks(use_ranks):
    """Makes the first four devices the job, for this test."""
    use_ranks(4)
