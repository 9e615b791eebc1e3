"""Trains in a job of several processes, leaves it, and looks for what is left of it."""

import atexit
import builtins
import gc
import sys
import threading
import weakref

import flax.linen as nn
import numpy as np
import pytest

hooks = sys.excepthook, sys.exit, builtins.exit, threading.active_count()

import tnt_jax as tnt  # noqa: E402
from tnt_jax import job  # noqa: E402

x = np.ones((32, 3), np.float32)
model = tnt.Model(nn.Dense(1))
model.compile("sgd", loss="mse")
model.fit(x, x[:, :1], batch_size=8, verbose=0)
process = tnt.get_process_index()
names = {thread.name for thread in threading.enumerate()}
assert {"tnt_jax-watch", "tnt_jax-samples"} <= names, names
made = [weakref.ref(value) for value in job._job.values.values() if hasattr(value, "__weakref__")]
assert len(made) > 2, made
functions = atexit._ncallbacks()
tnt.barrier()

tnt.shutdown()
del model
gc.collect()
assert not [value() for value in made if value() is not None], made
left = {thread.name for thread in threading.enumerate()} & names - {"MainThread"}
assert not {name for name in left if name.startswith("tnt_jax")}, left
assert (sys.excepthook, sys.exit, builtins.exit) == hooks[:3]
assert atexit._ncallbacks() <= functions
for _ in range(2):
    with pytest.raises(RuntimeError, match=r"left the job of 2 processes by tnt_jax.shutdown\(\)"):
        tnt.init()
print(f"{process} starts clean", flush=True)
