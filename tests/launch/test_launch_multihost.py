"""Jobs over several hosts through real ssh (`tests/helpers/hosts.py` says which)."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import HOSTS, SSH_ARGS, SSH_CONFIG, cut, finish, mend, needs_cuts, needs_hosts
from processes import SCRIPTS

from tnt_jax.launch.processtree import descendants

pytestmark = [pytest.mark.multihost, needs_hosts]
SLEEPER = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # JAX does so, too.
subprocess.Popen(["setsid", "sleep", "600"])
print(os.environ["TNT_JOB_ID"], flush=True)
time.sleep(600)
"""


def on_host(host, *command):
    return subprocess.run(
        ["ssh", "-F", SSH_CONFIG, host, shlex.join(command)],
        capture_output=True,
        text=True,
        timeout=30,
    )


def connections(launcher):
    """Returns the ids of the launcher's ssh clients by host."""
    found = {}
    for pid in descendants(launcher.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[0] == b"ssh":
            found[words[words.index(b"--") + 1].decode()] = pid
    return found


def test_ranks_go_host_by_host_and_nothing_is_lost_on_the_way(multihost, script, tmp_path):
    path = script(
        "import os, socket, sys\n"
        "e = os.environ\n"
        "print(e['TNT_PROCESS_ID'], e['TNT_NUM_PROCESSES'], socket.gethostname(), os.getcwd(), "
        "sys.argv[1:], "
        "[e.get(n) for n in ('ODD', 'NCCL_DEBUG', 'UNRELATED')])"
    )
    odd = ["a b", "'\"\\", "$HOME `id` *", "line\nbreak", "", "--", "-n"]
    environ = {"NCCL_DEBUG": "IN FO\n'", "UNRELATED": "stays here"}
    hosts = [f"{HOSTS[0]} slots=2", *HOSTS[1:]]
    arguments = ["--output-on-all-devices", "-x", "ODD=a 'b' \\$c", "--", path, *odd]
    code, out, err = finish(multihost(*arguments, hosts=hosts, environ=environ))
    assert (code, err) == (0, "")
    where = [HOSTS[0], *HOSTS]
    unrelated = [
        "stays here",
        "stays here",
        *[None] * (len(HOSTS) - 1),
    ]  # The first host is this one: it inherits.
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] {rank} {len(where)} {host} {tmp_path} {odd} "
        f"{['a ' + repr('b') + ' $c', environ['NCCL_DEBUG'], unrelated[rank]]}"
        for rank, host in enumerate(where)
    ]


def test_launching_host_need_not_take_part(multihost, script):
    path = script("import socket; print(socket.gethostname())")
    assert finish(multihost(path, hosts=HOSTS[1:]))[:2] == (0, HOSTS[1] + "\n")


ALL_REDUCE = """
import os
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
jax.distributed.initialize(
    os.environ["TNT_COORDINATOR_ADDRESS"], int(os.environ["TNT_NUM_PROCESSES"]), int(os.environ["TNT_PROCESS_ID"]))
print(multihost_utils.process_allgather(jnp.ones(1) * jax.process_index()).ravel())
"""


def test_hosts_meet_in_a_collective(multihost, script):
    code, out, err = finish(
        multihost(script(ALL_REDUCE), environ={"http_proxy": "http://127.0.0.1:9"})
    )
    assert code == 0, err
    assert out.splitlines()[-1] == str([float(rank) for rank in range(len(HOSTS))]).replace(
        ".0", "."
    ).replace(",", "")


def test_log_files_are_written_on_each_host(multihost, script, tmp_path):
    assert (
        finish(
            multihost("--log-dir", "logs", script("import os; print(os.environ['TNT_PROCESS_ID'])"))
        )[0]
        == 0
    )
    last = len(HOSTS) - 1
    assert on_host(HOSTS[last], "cat", f"{tmp_path}/logs/rank{last}.log").stdout == f"{last}\n"


@pytest.mark.parametrize("fault", ["unknown name", "refused key", "no sshd"])
def test_unreachable_host_is_named_before_anything_starts(multihost, script, tmp_path, fault):
    # A configuration without the key: with it, ssh would offer the key besides the wrong one.
    config = Path(SSH_CONFIG).read_text().splitlines(keepends=True)
    (tmp_path / "keyless").write_text(
        "".join(line for line in config if "IdentityFile" not in line)
    )
    hosts, ssh_args, message = {
        "unknown name": (
            [*HOSTS, "no-such-host.invalid"],
            SSH_ARGS,
            "no-such-host.invalid: .*Check its spelling in the hostfile",
        ),
        "refused key": (
            HOSTS,
            f"-F {tmp_path}/keyless -i /nonexistent",
            f"{HOSTS[1]}: .*ssh-copy-id {HOSTS[1]}",
        ),
        "no sshd": (HOSTS, f"{SSH_ARGS} -p 9", f"{HOSTS[1]}: .*Connection refused.* start sshd"),
    }[fault]
    code, _, err = finish(
        multihost(script(f"open({str(tmp_path / 'mark')!r}, 'w')"), hosts=hosts, ssh_args=ssh_args)
    )
    assert code == 2
    assert "nothing was started" in err
    assert re.search(message, err)
    assert not (tmp_path / "mark").exists()


def test_missing_script_is_named_with_its_hosts(multihost, tmp_path):
    code, _, err = finish(multihost(tmp_path / "none.py"))
    assert code == 2
    for host in HOSTS:
        assert f"{host}: There is no script {tmp_path}/none.py there" in err


def test_busy_port_is_named_with_its_host(multihost, script):
    with socket.create_server(("", 0)) as server:
        code, _, err = finish(multihost("--port", server.getsockname()[1], script("")))
    assert code == 2
    assert f"{HOSTS[0]}: port" in err


def test_failing_rank_is_named_with_its_host_and_ends_all(multihost, script, processes_on_hosts):
    path = script(
        "import os, sys, time\nif os.environ['TNT_PROCESS_ID'] == '1': time.sleep(2); "
        "sys.exit('the cause')\n" + SLEEPER
    )
    launcher = multihost(path)
    job_id = launcher.stdout.readline().strip()
    code, _, err = finish(launcher, timeout=15)
    assert code == 1
    assert f"Rank 1 on {HOSTS[1]} failed with exit code 1" in err
    assert "the cause" in err
    assert processes_on_hosts(job_id) == []


def test_killed_launcher_leaves_nothing_on_any_host(
    multihost, script, processes_on_hosts, wait_until
):
    launcher = multihost(script(SLEEPER))
    job_id = launcher.stdout.readline().strip()
    wait_until(lambda: len(processes_on_hosts(job_id)) == len(HOSTS))
    launcher.kill()
    wait_until(lambda: processes_on_hosts(job_id) == [])


def test_ctrl_c_ends_all_hosts(multihost, script, processes_on_hosts):
    launcher = multihost("--grace-period", 1, script(SLEEPER))
    job_id = launcher.stdout.readline().strip()
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher, timeout=15)[0] == 130
    assert processes_on_hosts(job_id) == []


def test_host_whose_supervisor_is_killed_is_named_and_the_others_end(
    multihost, script, processes_on_hosts
):
    path = script(
        "import os, time; print(os.environ['TNT_JOB_ID'], os.getppid(), flush=True); "
        "time.sleep(600)"
    )
    launcher = multihost("--output-on-all-devices", path)
    parents = {}
    for _ in HOSTS:
        *rank, job_id, parent = launcher.stdout.readline().split()
        parents[" ".join(rank)] = parent
    started = time.monotonic()
    on_host(HOSTS[1], "kill", "-9", parents["[rank 1]"])
    code, _, err = finish(launcher, timeout=20)
    assert code == 1
    assert f"Lost {HOSTS[1]} with rank 1" in err
    assert time.monotonic() - started < 15
    assert processes_on_hosts(job_id) == []


def test_silent_connection_is_noticed_on_both_sides(
    multihost, script, processes_on_hosts, wait_until
):
    launcher = multihost(script(SLEEPER))
    job_id = launcher.stdout.readline().strip()
    wait_until(lambda: len(processes_on_hosts(job_id)) == len(HOSTS))
    started = time.monotonic()
    os.kill(connections(launcher)[HOSTS[1]], signal.SIGSTOP)
    code, _, err = finish(launcher, timeout=25)
    assert code == 1
    assert f"Lost {HOSTS[1]} with rank 1: it has been silent" in err
    wait_until(lambda: processes_on_hosts(job_id) == [], timeout_s=started + 20 - time.monotonic())


def test_launcher_that_waits_for_its_reader_is_not_taken_for_dead(multihost, script):
    path = script("for i in range(100000): print(i)")
    launcher = multihost("--output-on-all-devices", path)
    time.sleep(12)  # Longer than a host may be silent.
    code, out, err = finish(launcher)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 100000 * len(HOSTS)


@needs_cuts
def test_host_that_is_cut_off_is_named_and_ends_its_own_processes(
    multihost, script, processes_on_hosts, wait_until
):
    launcher = multihost(script(SLEEPER))
    job_id = launcher.stdout.readline().strip()
    wait_until(lambda: len(processes_on_hosts(job_id)) == len(HOSTS))
    started = time.monotonic()
    cut(HOSTS[1])
    try:
        code, _, err = finish(launcher, timeout=40)
        ended_after = time.monotonic() - started
    finally:
        time.sleep(max(0.0, started + 15 - time.monotonic()))
        mend(HOSTS[1])
    assert code == 1
    assert f"Lost {HOSTS[1]} with rank 1" in err
    assert ended_after < 15
    assert processes_on_hosts(job_id) == []


def test_cleanup_of_one_of_two_jobs_leaves_the_other_alone(
    tnt_jax, multihost, run, hostfile, script, processes_on_hosts
):
    launchers = [multihost("--grace-period", 1, script(SLEEPER)) for _ in range(2)]
    ended, other = (launcher.stdout.readline().strip() for launcher in launchers)
    code, out, _ = run(
        "--hostfile", hostfile(*HOSTS), "--ssh-args", SSH_ARGS, "--cleanup", ended, "--force"
    )
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == HOSTS
    assert processes_on_hosts(ended) == []
    assert len(processes_on_hosts(other)) == len(HOSTS)
    launchers[1].terminate()
    finish(launchers[1])


def test_dry_run_shows_the_plan_of_all_hosts(multihost, script):
    code, out, _ = finish(multihost("--dry-run", "--devices-per-node", 2, script("")))
    assert code == 0
    for rank in range(2 * len(HOSTS)):
        assert f"rank {rank} on {HOSTS[rank // 2]} (local rank {rank % 2})" in out
    assert sys.executable in out


@pytest.fixture
def allocation(tmp_path):
    """Returns the environment of a batch script of SLURM to which the hosts are allocated."""
    # What srun does with one task, done by ssh.
    fake = tmp_path / "srun"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import os, shlex, sys\n"
        "words = sys.argv[1:]\n"
        "(node,) = [word.partition('=')[2] for word in words if word.startswith('--nodelist=')]\n"
        "command = [word for word in words if not word.startswith('--')]\n"
        f"os.execvp('ssh', ['ssh', '-F', {SSH_CONFIG!r}, node, shlex.join(command)])\n"
    )
    fake.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": ",".join(HOSTS),
        "SLURM_JOB_ID": "7",
    }


def test_allocation_of_slurm_is_used_through_srun(tnt_jax, script, tmp_path, allocation):
    path = script("import os, socket; print(os.environ['TNT_NUM_PROCESSES'], socket.gethostname())")
    launcher = tnt_jax(
        "--no-gpu", "--output-on-all-devices", path, environ=allocation, cwd=tmp_path
    )
    code, out, err = finish(launcher)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] {len(HOSTS)} {host}" for rank, host in enumerate(HOSTS)
    ]


@pytest.mark.long
def test_scaling_is_measured_in_an_allocation_of_slurm(tnt_jax, script, tmp_path, allocation):
    path = script((SCRIPTS / "train_on_hosts.py").read_text())
    words = ["--ranks", 1, 2, "--no-gpu", "--devices-per-node", 1, "--rounds", 1, "--steps", 3]
    folder = tmp_path / "results"
    launcher = tnt_jax(
        "scale", *words, "--output", folder, "--", path, environ=allocation, cwd=tmp_path
    )
    code, _, err = finish(launcher, timeout=200)
    assert code == 0, err
    runs = json.loads((folder / "scaling.json").read_text())["runs"]
    assert [(run["ranks"], run["hosts"], run["processes"]) for run in runs] == [
        (1, 1, 1),
        (2, 2, 2),
    ]


def test_doctor_measures_every_pair_of_hosts(run, hostfile, tmp_path):
    arguments = ["--hostfile", hostfile(*HOSTS), "--ssh-args", SSH_ARGS, "--no-gpu", "--json"]
    code, out, err = run("doctor", *arguments, cwd=tmp_path, timeout=120)
    assert code == 0, out + err
    links = json.loads(out)["links"]
    assert len(links) == (len(HOSTS) * (len(HOSTS) - 1) // 2 if len(HOSTS) <= 4 else len(HOSTS))
    assert all(link["from"] != link["to"] and link["bandwidth_mb_per_s"] > 0 for link in links)
