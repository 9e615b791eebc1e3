"""`tnt-jax --ray` on a real cluster of Ray: where processes run, how they end, and what stays."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from ray_clusters import await_nothing_left, ray_cluster_of

from tnt_jax.launch.planning.options import parse_options
from tnt_jax.launch.remote.hosts import taking_hosts
from tnt_jax.launch.remote.session import HostError

# Each process has another that leaves its session, and saves its state when it is asked to end.
WAITS = """
import os, pathlib, signal, subprocess, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path("saved" + os.environ["TNT_PROCESS_ID"]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
subprocess.Popen(["setsid", "sleep", "600"])
print("up", os.environ["TNT_PROCESS_ID"], os.environ["TNT_JOB_ID"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def launcher(launcher_of, ray_cluster):
    """Starts `tnt-jax --ray` with a script, on the tests' cluster; returns the running program."""
    return launcher_of(ray_cluster)


@pytest.fixture
def launcher_of(tmp_path):
    """Returns such a function for any cluster."""
    started = []

    def start(cluster, script, *options, arguments=()):
        path = tmp_path / "script.py"
        path.write_text(script)
        words = ["--ray", "--ray-address", cluster.address, "--no-gpu", *map(str, options)]
        program = subprocess.Popen(
            [sys.executable, "-m", "tnt_jax.launch", *words, "--", path, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip
        started.append(program)
        return program

    yield lambda cluster: partial(start, cluster)
    for program in started:
        program.kill()
        program.wait()


def await_lines(program, count):
    """Returns so many lines of a program's output, in their order, as words."""
    return sorted(program.stdout.readline().split() for _ in range(count))


@pytest.mark.multiprocess
def test_a_failing_rank_gives_its_code_and_output_through_ray(
    launcher, ray_cluster, tmp_path, monkeypatch
):
    # The cluster was started without it.
    monkeypatch.setenv("MYVAR", "hello")
    program = launcher(
        "import os, pathlib, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "rank = os.environ['TNT_PROCESS_ID']\n"
        "of = os.environ['TNT_NUM_PROCESSES']\n"
        "print(os.environ.get('MYVAR'), 'I am', rank, 'of', of, flush=True)\n"
        "(folder / f'printed{rank}').touch()\n"
        "while len(list(folder.glob('printed*'))) < 3: time.sleep(0.05)\n"
        "if rank == '1': time.sleep(1); sys.exit('the cause')\n"
        "sys.stdin.read()\n"
        "time.sleep(600)\n",
        "-n", 3, "--output-on-all-devices",
    )  # fmt: skip
    out, err = program.communicate(timeout=90)
    assert program.returncode == 1
    assert sorted(out.splitlines()) == [f"[rank {r}] hello I am {r} of 3" for r in range(3)]
    assert "failed with exit code 1" in err
    assert "the cause" in err


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "dies",
    [
        "launcher",
        pytest.param("broker", marks=pytest.mark.long),
        pytest.param("node", marks=pytest.mark.long),
    ],
)
def test_whatever_is_killed_nothing_stays_on_the_cluster(launcher, ray_cluster, tmp_path, dies):
    program = launcher(WAITS, "-n", 2, "--output-on-all-devices")
    lines = await_lines(program, 2)
    assert [line[-2] for line in lines] == ["0", "1"]
    job_id = lines[0][-1]
    relays = socket_of_relays(program)
    assert relays.is_socket()
    os.kill(victim(dies, program), signal.SIGKILL)
    code = program.wait(60)
    assert code == -signal.SIGKILL if dies == "launcher" else code not in (0, None)
    await_nothing_left(ray_cluster.address, job_id)
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    if dies != "broker":  # Which can remove nothing.
        assert not relays.parent.exists()


def socket_of_relays(program):
    """Returns the socket that connects a launcher with its nodes."""
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    words = [read(Path(f"/proc/{pid}/cmdline")).split(b"\0") for pid in children]
    return Path(next(each[4] for each in words if b"on_ray.relay" in b" ".join(each[3:4])).decode())


def victim(who, program):
    """Returns the process id of a part of a running job."""
    if who == "launcher":
        return program.pid
    wanted = {"broker": "on_ray.broker", "node": "ray::Program"}[who]
    (found, *_) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if wanted.encode() in read(path)
    ]
    return found


def read(path):
    try:
        return path.read_bytes()
    except OSError:  # It has ended.
        return b""


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_signal_reaches_the_processes_and_gives_them_time(launcher, ray_cluster):
    program = launcher(
        "import os, signal, sys, time\n"
        "def end(*_): print('saved', flush=True); sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n",
        "-n", 1,
    )  # fmt: skip
    assert program.stdout.readline() == "up\n"
    program.terminate()
    out, _ = program.communicate(timeout=60)
    assert (out, program.returncode) == ("saved\n", 143), "128 and the signal, as on other hosts."


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_launcher_that_waits_for_room_says_so_and_can_be_ended(launcher, ray_cluster):
    program = launcher(WAITS, "-n", 99)
    said = program.stderr.readline()
    assert "Waiting for room for 99 processes, each with 1 CPU; there is room for 4." in said
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=30)
    assert program.returncode == 130
    await_nothing_left(ray_cluster.address, "none")


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_lost_node_leads_to_a_restart_on_the_devices_that_are_left(launcher, ray_cluster):
    node = ray_cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    script = (
        "import os, sys, time\n"
        "print('up', os.environ['TNT_NUM_PROCESSES'], os.environ.get('TNT_RESTART_COUNT', '0'), "
        "flush=True)\n"
        "if os.environ.get('TNT_RESTART_COUNT', '0') == '0': time.sleep(600)\n"
    )
    try:
        options = ("-n", 6, "--min-devices", 3, "--max-restarts", 1, "--output-on-all-devices")
        program = launcher(script, *options)
        assert [line[-2:] for line in await_lines(program, 6)] == [["6", "0"]] * 6
    finally:
        ray_cluster.remove_node(node, allow_graceful=False)
    out, err = program.communicate(timeout=180)
    assert program.returncode == 0, err
    assert [line.split()[-2:] for line in out.splitlines()] == [["4", "1"]] * 4


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_ranks_on_two_nodes_train_as_one_device(launcher, ray_cluster, tmp_path):
    node = ray_cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    script = (
        "import json, sys\n"
        "import flax.linen as nn, numpy as np, tnt_jax as tnt\n"
        "x = np.random.default_rng(0).normal(size=(45, 4)).astype('f4')\n"
        "model = tnt.Model(nn.Dense(1))\n"
        "model.compile(tnt.optimizers.SGD(0.1), loss='mse')\n"
        "history = model.fit(x, x.sum(1, keepdims=True), batch_size=10, epochs=2, verbose=0)\n"
        "print(json.dumps([tnt.get_size(), history.history['loss']]), flush=True)\n"
    )
    try:
        program = launcher(script, "-n", 5)
        out, err = program.communicate(timeout=180)
    finally:
        ray_cluster.remove_node(node)
    assert program.returncode == 0, err
    alone = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True, text=True, check=True, timeout=120, env=one_device(),
    )  # fmt: skip
    (size, losses), (_, expected) = json.loads(out), json.loads(alone.stdout)
    assert size == 5
    assert losses == pytest.approx(expected, rel=1e-6)


TRAINS = """
import json, os, pathlib, signal, sys, time
import flax.linen as nn, numpy as np, tnt_jax as tnt
out, fate = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ.get("TNT_PROCESS_ID")
planned, joins = int(os.environ.get("TNT_NUM_PROCESSES", 1)), "TNT_ELASTIC_JOINS" in os.environ
class Fate(tnt.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 5 and not joins and fate != "none":
            (out / f"trains{rank}").touch()
            if fate == rank:
                os.kill(os.getpid(), signal.SIGKILL)
        if fate == "node" and self.steps > 5:
            time.sleep(0.5)
        # A process that is to join finds the others in the middle.
        if self.steps > 8 and tnt.get_process_count() < planned:
            time.sleep(2)
x = np.random.default_rng(0).normal(size=(45, 4)).astype("f4")
# No line fits it, so that losses stay far from zero.
y = np.square(x).sum(1, keepdims=True)
model = tnt.Model(nn.Dense(1), seed=1)
model.compile(tnt.optimizers.SGD(0.1), loss="mse")
history = model.fit(x, y, batch_size=10, epochs=9, verbose=0, callbacks=[Fate()])
text = json.dumps([tnt.get_size(), joins, history.history["loss"]])
(out / f"{rank}.json").write_text(text)
"""


def check_elastic_job(program, folder, how):
    """Checks that one of two processes was lost and another joined, with the result of one.

    Returns the host of the one that was lost, and what the launcher said.
    """
    _, err = program.communicate(timeout=180)
    assert program.returncode == 0, err
    found = re.search(rf"process (\d) on (\S+) {how}", err)
    assert found, err
    lost, host = found.groups()
    assert f"process {lost} joins on {host}" in err
    subprocess.run(
        [sys.executable, str(folder / "script.py"), str(folder), "none"],
        check=True, timeout=120, env=one_device(),
    )  # fmt: skip
    size, _, expected = json.loads((folder / "None.json").read_text())
    assert size == 1
    for rank in range(2):
        size, joins, losses = json.loads((folder / f"{rank}.json").read_text())
        assert (size, joins) == (2, rank == int(lost))
        assert losses == pytest.approx(expected, rel=1e-5)
    return host, err


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_job_trains_on_without_a_process_and_another_joins(launcher, ray_cluster, tmp_path):
    program = launcher(TRAINS, "-n", 2, "--elastic", arguments=[tmp_path, "1"])
    host, _ = check_elastic_job(program, tmp_path, "was ended by signal 9")
    assert host == socket.gethostname()


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_job_trains_on_without_a_node_and_another_takes_its_place(
    launcher_of, tmp_path, wait_until
):
    small = {"num_cpus": 1, "object_store_memory": 100_000_000}
    with ray_cluster_of(num_cpus=1) as cluster:
        lost = cluster.add_node(**small)
        cluster.wait_for_nodes()
        words = ["-n", 2, "--elastic"]
        program = launcher_of(cluster)(TRAINS, *words, arguments=[tmp_path, "node"])
        wait_until(lambda: len(list(tmp_path.glob("trains*"))) == 2, timeout_s=90)
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(**small)
        host, err = check_elastic_job(program, tmp_path, "is out of reach")
        assert f"{host} has a node of Ray again" in err


def one_device():
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def test_a_cluster_that_is_not_there_is_named_in_the_error():
    pytest.importorskip("ray")
    options = parse_options(
        ["--ray", "-n", "2", "--ray-address", "127.0.0.1:1", "x.py"], version=""
    )
    with (
        taking_hosts(options, {}) as take,
        pytest.raises(HostError, match=r"No Ray cluster answers at 127\.0\.0\.1:1"),
    ):
        take()
