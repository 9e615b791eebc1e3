"""Eight virtual CPU devices for the tests' own process, set before JAX starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# The pool of threads has as many threads as cores by default; collectives of virtual devices deadlock below twice their number.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
