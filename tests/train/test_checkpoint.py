"""Checkpoints: exact, atomic, in the background, and readable on another number of devices."""

import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tnt_jax
from tnt_jax import _jax
from tnt_jax.train.checkpoints.checkpoint import Checkpoints, Position
from tnt_jax.train.state import check_match, create_state, state_arrays, with_arrays


def make_state(*, scale=1.0, width=3, dtype=jnp.float32):
    params = {
        "Dense_0": {
            "kernel": scale * jnp.arange(4 * width, dtype=dtype).reshape(4, width),
            "bias": jnp.zeros(width, dtype),
        }
    }
    model_state = {"batch_stats": {"mean": jnp.full(width, scale)}}
    return create_state(params, model_state, optax.adam(1e-3), seed=7)


def on_all_devices(state):
    return _jax.replicate(state, tnt_jax.init().mesh)


def assert_equal_states(a, b):
    a, b = state_arrays(a), state_arrays(b)
    assert list(a) == list(b)
    for path, leaf in a.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(b[path]), err_msg=path)
        assert np.asarray(leaf).dtype == np.asarray(b[path]).dtype, path


def test_what_is_read_is_what_was_saved(tmp_path):
    state = on_all_devices(replace(make_state(scale=2.0, dtype=jnp.bfloat16), step=jnp.int32(5)))
    checkpoints = Checkpoints(tmp_path / "a")
    number = checkpoints.save(
        state,
        position=Position(3, 11),
        extra={"sums/0": np.float32(1.5)},
        notes={"module": {"class": "x:Y"}},
    )
    checkpoints.close()

    saved = Checkpoints(tmp_path / "a").read()
    assert (saved.number, number) == (5, 5)
    assert saved.position == Position(3, 11)
    assert saved.notes == {"module": {"class": "x:Y"}}
    assert saved.extra == {"sums/0": np.float32(1.5)}
    assert_equal_states(with_arrays(make_state(dtype=jnp.bfloat16), saved.arrays), state)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """The buffers of the saved state are donated to the next step at once."""
    state = on_all_devices(make_state(scale=3.0))
    expected = jax.tree.map(np.array, state_arrays(state))
    step = jax.jit(
        lambda s: replace(s, step=s.step + 1, params=jax.tree.map(lambda x: x * 2 + 1, s.params)),
        donate_argnums=0,
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state)
    for _ in range(20):
        state = step(state)
    checkpoints.close()
    arrays = Checkpoints(tmp_path).read().arrays
    assert arrays.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(arrays[path], leaf, err_msg=path)


def test_old_checkpoints_go_and_numbers_never_repeat(tmp_path):
    checkpoints = Checkpoints(tmp_path, max_to_keep=2)
    state = make_state()
    numbers = [checkpoints.save(replace(state, step=jnp.int32(step))) for step in (4, 4, 2, 9)]
    checkpoints.close()
    assert numbers == [4, 5, 6, 9]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tnt_jax_step_6", "tnt_jax_step_9"]
    assert Checkpoints(tmp_path).newest() == 9


def test_shapes_are_known_without_reading(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(width=5))
    checkpoints.wait()
    shapes = checkpoints.shapes()
    assert shapes["params/Dense_0/kernel"] == jax.ShapeDtypeStruct((4, 5), jnp.float32)
    assert shapes["opt_state/0/mu/Dense_0/bias"].shape == (5,)


def test_a_mismatch_names_the_leaves():
    saved = {**state_arrays(make_state(width=5)), "params/Dense_1/kernel": np.zeros(2, np.float32)}
    del saved["model_state/batch_stats/mean"]
    with pytest.raises(ValueError, match="not in the file: model_state/batch_stats/mean") as error:
        with_arrays(make_state(width=3), saved)
    assert "not in the model: params/Dense_1/kernel" in str(error.value)
    assert "params/Dense_0/kernel (file: float32[4, 5], model: float32[4, 3])" in str(error.value)


def test_a_mismatch_of_many_leaves_says_how_many():
    with pytest.raises(ValueError, match="a7 and 12 more"):
        check_match({f"a{i}": np.zeros(1) for i in range(20)}, {})


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint in .*nothing"):
        Checkpoints(tmp_path / "nothing").read()
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match="max_to_keep must be at least 1"):
        Checkpoints(tmp_path, max_to_keep=0)


WRITER = """
    import jax, jax.numpy as jnp, optax, sys
    from tnt_jax.train.checkpoints.checkpoint import Checkpoints
    from tnt_jax.train.state import create_state
    checkpoints = Checkpoints(sys.argv[1])
    state = create_state({"w": jnp.zeros((256, 1024))}, {}, optax.sgd(1.0), seed=0)
    import dataclasses
    for step in range(10_000):
        # Every array says which checkpoint it belongs to.
        state = dataclasses.replace(state, step=jnp.int32(step), params={"w": jnp.full((256, 1024), step, jnp.float32)})
        checkpoints.save(state)
        print(step, flush=True)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.004, 0.011, 0.017])
def test_a_crash_at_any_moment_leaves_a_readable_checkpoint(tmp_path, wait_s):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    started = 0
    for line in process.stdout:
        started = int(line)
        if started == 4:
            break
    time.sleep(wait_s)
    process.send_signal(signal.SIGKILL)
    process.wait()

    saved = Checkpoints(tmp_path).read()
    # A save begins when the one before is complete.
    assert saved.number >= started - 1
    np.testing.assert_array_equal(
        saved.arrays["params/w"], np.full((256, 1024), saved.number, np.float32)
    )
    assert saved.arrays["step"] == saved.number


@pytest.mark.parametrize(("devices", "readers"), [(1, 4), (4, 1)])
def test_another_number_of_devices_reads_the_same(tmp_path, devices, readers):
    script = textwrap.dedent("""
        import sys, numpy as np, jax, jax.numpy as jnp, optax, tnt_jax
        from tnt_jax import _jax
        from tnt_jax.train.checkpoints.checkpoint import Checkpoints
        from tnt_jax.train.state import with_arrays
        from tnt_jax.train.state import create_state
        mesh = tnt_jax.init().mesh
        state = _jax.replicate(create_state({"w": jnp.arange(6.0)}, {}, optax.adam(0.1), seed=3), mesh)
        checkpoints = Checkpoints(sys.argv[1])
        if sys.argv[2] == "write":
            checkpoints.save(state)
        else:
            state = _jax.replicate(with_arrays(state, checkpoints.read().arrays), mesh)
            assert len(state.params["w"].sharding.device_set) == int(sys.argv[3])
            print(np.asarray(state.params["w"]).tolist())
        checkpoints.close()
    """)
    for mode, count in (("write", devices), ("read", readers)):
        environment = {
            **__import__("os").environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "JAX_PLATFORMS": "cpu",
        }
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), mode, str(count)],
            capture_output=True, text=True, env=environment, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]"
