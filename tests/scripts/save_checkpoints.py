"""Checkpoints of a job, as `save_checkpoints.py DIRECTORY CASE...`; each process prints what
happened. A case has the folder of its name in the directory.
"""

import logging
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax.train.checkpoints.checkpoint import Checkpoints
from tnt_jax.train.state import create_state, state_arrays, with_arrays
from tnt_jax.train.steps.sharded_step import shardings

MESH = tnt.init().mesh
HERE = jax.process_index()
WARNINGS = []


class Keep(logging.Handler):
    def emit(self, record):
        WARNINGS.append(record.getMessage())


logging.getLogger("tnt_jax").addHandler(Keep(level="WARNING"))


def make_state(step, *, spread):
    """Returns a state; with `spread`, each process holds a part of it."""
    params = {"w": jnp.arange(64.0).reshape(8, 8) * (step + 1)}
    host = create_state(params, {}, optax.adam(0.1), seed=0)
    state = _jax.replicate(replace(host, step=np.int32(step)), MESH)
    if not spread:
        return state
    moments = jax.tree.map(lambda x: x + step, host.opt_state)
    rows = {"w": np.arange(MESH.size * 64.0, dtype=np.float32).reshape(MESH.size, 8, 8)}
    return replace(
        state,
        opt_state=_jax.put(moments, shardings(moments, MESH)),
        accumulated=_jax.shard_rows(rows, MESH),
    )


def tell(text):
    """Prints a text with the number of the process and the case."""
    print(f"{HERE} {DIRECTORY.name}: {text}", flush=True)


def limit_files(num_bytes):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


def spread():
    """Saves a state of which each process holds a part, and reads it."""
    checkpoints = Checkpoints(DIRECTORY)
    state = make_state(3, spread=True)
    checkpoints.save(state)
    checkpoints.close()
    saved = Checkpoints(DIRECTORY).read_newest_valid()
    whole = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())
    expected = jax.tree.map(np.asarray, jax.jit(lambda x: x, out_shardings=whole)(state))
    for path, leaf in state_arrays(expected).items():
        np.testing.assert_array_equal(saved.arrays[path], leaf, err_msg=path)
    with_arrays(state, saved.arrays)
    tell(f"read {len(saved.arrays)}")


def full(*, on_save_error="warn", process=1, is_spread=True):
    """One process cannot write for a while."""
    checkpoints = Checkpoints(DIRECTORY, on_save_error=on_save_error)
    checkpoints.save(make_state(1, spread=is_spread))
    checkpoints.wait()
    if process == HERE:
        limit_files(100)
    start = time.monotonic()
    try:
        for step in (2, 3):
            checkpoints.save(make_state(step, spread=is_spread))
        checkpoints.wait()
    except OSError as error:
        tell(f"raises {error}")
    assert time.monotonic() - start < 20
    limit_files(resource.RLIM_INFINITY)
    tell(f"newest {Checkpoints(DIRECTORY).read_newest_valid().number}")
    if on_save_error == "warn":
        checkpoints.save(make_state(4, spread=is_spread))
        checkpoints.wait()
        tell(f"then {checkpoints.newest()}")
    tell(f"warned {len([text for text in WARNINGS if 'could not be written' in text])}")
    checkpoints.close()


def views():
    """Each process reads directories of its own; checkpoints are damaged in those of one."""
    saved = Checkpoints(DIRECTORY / "some" / str(HERE)).read_newest_valid()
    tell(f"read {saved.number}")
    tell(f"warned {WARNINGS}")
    try:
        Checkpoints(DIRECTORY / "none" / str(HERE)).read_newest_valid()
    except OSError as error:
        tell(f"raises {error}")


def locked():
    """Another job writes to the directory."""
    try:
        Checkpoints(DIRECTORY).save(make_state(1, spread=False))
    except RuntimeError as error:
        tell(f"raises {type(error).__name__} {error}")


def alone():
    """Each process writes by itself."""
    checkpoints = Checkpoints(DIRECTORY / str(HERE), alone=True)
    checkpoints.save(make_state(HERE, spread=False))
    checkpoints.close()
    saved = Checkpoints(DIRECTORY / str(HERE), alone=True).read_newest_valid()
    tell(f"read {saved.arrays['params/w'][0, 1]}")


CASES = {
    "spread": spread,
    "full": full,
    "full leader": lambda: full(process=0, is_spread=False),
    "full raise": lambda: full(on_save_error="raise"),
    "full leader raise": lambda: full(on_save_error="raise", process=0, is_spread=False),
    "views": views,
    "locked": locked,
    "alone": alone,
}
for case in sys.argv[2:]:
    DIRECTORY = Path(sys.argv[1], case)
    WARNINGS.clear()
    CASES[case]()
