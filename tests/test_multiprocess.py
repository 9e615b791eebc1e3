"""Real processes started by the real launcher give the numbers of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.multiprocess
SCRIPTS = Path(__file__).parent / "scripts"


def environment(**extra):
    """Returns an environment without this process's virtual devices."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC") and not k.startswith("TNT_")}
    return kept | {"JAX_PLATFORMS": "cpu"} | extra


def launch(num_processes, *command, flags=(), timeout_s=240, **extra):
    launcher = ["-m", "tnt_jax.launch", "-n", str(num_processes), "--no-gpu", *flags, "--"]
    starter = [sys.executable, *launcher] if num_processes else [sys.executable]
    return subprocess.run(
        [*starter, *map(str, command)], capture_output=True, text=True, timeout=timeout_s, env=environment(**extra)
    )


def train(num_processes, recipe, folder, **options):
    folder.mkdir()
    result = launch(num_processes, SCRIPTS / "train_parity.py", json.dumps(recipe), folder, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return [dict(np.load(file)) for file in sorted(folder.iterdir())], result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("source", ["arrays", "batches"])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_equal_one(num_processes, source, tmp_path):
    recipe = {"num_examples": 31, "size": 9, "source": source}
    (alone,), _ = train(0, recipe, tmp_path / "alone")
    together, screen = train(num_processes, recipe, tmp_path / "together")
    assert len(together) == num_processes
    for index, result in enumerate(together):
        assert result.pop("rank") == index
        assert result.pop("size") == num_processes
        for name, value in result.items():
            np.testing.assert_allclose(value, alone[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert screen.count("Epoch 2/2") == 1, "Only the master prints."


@pytest.mark.slow
def test_processes_of_two_devices_that_accumulate_equal_one(tmp_path):
    recipe = {"num_examples": 31, "size": 9, "source": "arrays", "accumulation": 2}
    (alone,), _ = train(0, recipe, tmp_path / "alone")
    together, _ = train(2, {**recipe, "devices": 2}, tmp_path / "together")
    for result in together:
        assert result["size"] == 4
        for name in alone.keys() - {"rank", "size"}:
            np.testing.assert_allclose(result[name], alone[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_ring_gives_the_bits_of_sums_by_xla(tmp_path):
    # Statistics of each rank's own rows, which the ranks average.
    recipe = {"num_examples": 31, "size": 9, "source": "arrays", "axis_name": None}
    ring, _ = train(2, recipe, tmp_path / "ring")
    xla, _ = train(2, recipe, tmp_path / "xla", TNT_FUSION_THRESHOLD="xla")
    for own, other in zip(ring, xla, strict=True):
        for name, value in own.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_an_exception_on_one_rank_ends_the_others_and_passes_its_code_on(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(
        "import numpy as np, flax.linen as nn, tnt_jax as tnt\n"
        "model = tnt.Model(nn.Dense(1))\n"
        "model.compile('sgd', loss='mse')\n"
        "class Fail(tnt.callbacks.Callback):\n"
        "    def on_train_batch_begin(self, batch, logs=None):\n"
        "        if batch == 2 and tnt.get_rank() == 1: raise KeyError('broken on one rank')\n"
        "model.fit(np.zeros((64, 3), 'f4'), np.zeros((64, 1), 'f4'), batch_size=4, epochs=1000, callbacks=[Fail()], verbose=0)\n"
    )
    result = launch(2, script, timeout_s=120)
    assert result.returncode == 1
    assert "broken on one rank" in result.stderr
    assert "rank 1" in result.stderr.lower()


def test_bad_input_is_refused_on_every_process_alike(tmp_path):
    # Only process 1 sees the wrong label: rows 2 and 3 of the first batch are its own.
    script = tmp_path / "bad_label.py"
    script.write_text(
        "import numpy as np, flax.linen as nn, tnt_jax as tnt\n"
        "model = tnt.Model(nn.Dense(3))\n"
        "model.compile('sgd', loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))\n"
        "try:\n"
        "    model.fit([(np.zeros((4, 2), 'f4'), np.array([0, 1, 2, 3]))], verbose=0)\n"
        "except (ValueError, RuntimeError) as error:\n"
        "    print('caught', tnt.get_rank(), error, flush=True)\n"
    )
    result = launch(2, script, flags=["--output-on-all-devices"], timeout_s=120)
    assert result.returncode == 0, result.stderr
    assert "caught 0 Process 1 failed: ValueError" in result.stdout
    assert "caught 1 Loss" in result.stdout
    assert result.stdout.count("integer labels in [0, 3)") == 2


def test_coordinator_variables_join_a_job(tmp_path):
    code = "import tnt_jax as tnt; print(tnt.get_rank(), tnt.get_size(), tnt.get_process_count(), tnt.is_master_rank()); tnt.barrier()"
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"TNT_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "TNT_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment(**shared, TNT_PROCESS_ID=str(i))
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]
    assert outputs == ["0 2 2 True", "1 2 2 False"]


@pytest.mark.slow
def test_processes_wait_for_one_that_begins_late(tmp_path):
    # Gloo, which connects the processes in their first collective, gives up after 30 seconds.
    script = tmp_path / "late.py"
    script.write_text(
        "import time, numpy as np, tnt_jax as tnt\n"
        "from tnt_jax import collectives\n"
        "tnt.init()\n"
        "time.sleep(33 * tnt.get_rank())\n"
        "print('sum', collectives.all_reduce(np.float32(tnt.get_rank() + 1)), flush=True)\n"
    )
    result = launch(2, script, flags=["--output-on-all-devices"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 3.0") == 2


@pytest.mark.slow
def test_averaged_weights_that_lie_in_parts_are_those_that_every_process_keeps(tmp_path):
    script = tmp_path / "average.py"
    script.write_text(
        "import numpy as np, flax.linen as nn, jax, tnt_jax as tnt\n"
        "x = np.random.default_rng(0).normal(size=(32, 4)).astype('f4')\n"
        "def train(**choices):\n"
        "    model = tnt.Model(nn.Dense(6), **choices)\n"
        "    model.compile(tnt.optimizers.Adam(0.01, use_ema=True), loss='mse')\n"
        "    for _ in range(2): model.fit(x, np.ones((32, 6), 'f4'), batch_size=8, shuffle=False, verbose=0)\n"
        "    return jax.tree.leaves(model.variables)\n"
        "for part, whole in zip(train(shard_optimizer_state=True), train(), strict=True):\n"
        "    np.testing.assert_allclose(part, whole, rtol=1e-6, atol=1e-6)\n"
        "print('equal', flush=True)\n"
    )
    result = launch(2, script, flags=["--output-on-all-devices"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("equal") == 2


def test_a_killed_process_ends_the_others_without_the_launcher(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, flax.linen as nn, tnt_jax as tnt\n"
        "model = tnt.Model(nn.Dense(1))\n"
        "model.compile('sgd', loss='mse')\n"
        "class Tell(tnt.callbacks.Callback):\n"
        "    def on_epoch_end(self, epoch, logs=None): print('epoch', epoch, flush=True)\n"
        "model.fit(np.zeros((64, 3), 'f4'), np.zeros((64, 1), 'f4'), batch_size=4, epochs=100000, callbacks=[Tell()], verbose=0)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(TNT_COORDINATOR_ADDRESS=address, TNT_NUM_PROCESSES="2", TNT_PROCESS_ID=str(process)),
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        assert "epoch 0\n" in iter(started[0].stdout.readline, "")
        started[1].kill()
        _, errors = started[0].communicate(timeout=100)
    finally:
        for process in started:
            process.kill()
    assert started[0].returncode != 0
    assert "lost a neighbour in the ring of 2" in errors
