"""Eight virtual CPU devices for the tests' own process, set before JAX starts."""

import os
import tempfile

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# The pool of threads has as many threads as cores by default; collectives of virtual devices deadlock below twice their number.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Many tests compile the same small programs, also in processes of their own.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"tnt_jax-tests-{os.getuid()}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture
def use_ranks():
    """Returns a function that makes the first `num_ranks` devices the job, for this test."""
    import tnt_jax as tnt

    def use(num_ranks):
        tnt.shutdown()
        tnt.init(devices=range(num_ranks))

    yield use
    tnt.shutdown()
