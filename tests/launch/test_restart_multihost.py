"""Restarts over several hosts: one is lost, the job goes on without it, and it comes back."""

import time

import pytest
from hosts import HOSTS, SSH_ARGS, cut, finish, mend, needs_cuts, needs_hosts

pytestmark = [pytest.mark.multihost, needs_hosts]
# Each attempt runs until a file with its number appears.
WAITING = """
import os, pathlib, socket, sys, time
restart = int(os.environ["TNT_RESTART_COUNT"])
print(restart, os.environ["TNT_NUM_PROCESSES"], socket.gethostname(), flush=True)
while not pathlib.Path(f"end{restart}").exists(): time.sleep(0.1)
sys.exit(int(restart < 2))
"""


def read_attempt(launcher, num_hosts):
    """Returns what the processes of an attempt print."""
    lines = [launcher.stdout.readline().split()[2:] for _ in range(num_hosts)]
    return sorted(tuple(line) for line in lines)


@needs_cuts
@pytest.mark.skipif(len(HOSTS) < 3, reason="needs three hosts")
def test_job_goes_on_without_a_lost_host_and_takes_it_in_when_it_returns(
    multihost, script, tmp_path, processes_on_hosts
):
    left = [host for host in HOSTS if host != HOSTS[1]]
    options = ["--max-restarts", 3, "--min-hosts", len(left), "--output-on-all-devices"]
    # The host does not answer at all, and ssh need not wait for it for ten seconds.
    ssh_args = f"{SSH_ARGS} -o ConnectTimeout=3"
    launcher = multihost(*options, script(WAITING, "waiting.py"), ssh_args=ssh_args)
    everyone = len(HOSTS)
    assert read_attempt(launcher, everyone) == [("0", str(everyone), host) for host in HOSTS]
    cut(HOSTS[1])
    started = time.monotonic()
    try:
        assert read_attempt(launcher, len(left)) == [("1", str(len(left)), host) for host in left]
        assert time.monotonic() - started < 40
    finally:
        mend(HOSTS[1])
    (tmp_path / "end1").touch()
    assert read_attempt(launcher, everyone) == [("2", str(everyone), host) for host in HOSTS]
    (tmp_path / "end2").touch()
    code, _, err = finish(launcher)
    assert code == 0, err
    assert f"Cause: Lost {HOSTS[1]} with rank 1: it has been silent" in err
    assert f"Without {HOSTS[1]}: " in err
    assert f"Restart 1 starts on {', '.join(left)}." in err
    assert f"Restart 2 starts on {', '.join(HOSTS)}." in err
    assert processes_on_hosts("waiting-") == []


def test_host_that_cannot_be_reached_is_left_out_at_the_first_start(multihost, script):
    path = script("import os, socket; print(os.environ['TNT_NUM_PROCESSES'], socket.gethostname())")
    hosts = [HOSTS[0], "no-such-host.invalid", HOSTS[1]]
    launcher = multihost("--min-hosts", 2, "--output-on-all-devices", path, hosts=hosts)
    code, out, err = finish(launcher)
    assert (code, sorted(out.splitlines())) == (
        0,
        [f"[rank {rank}] 2 {host}" for rank, host in enumerate(HOSTS[:2])],
    )
    assert "Without no-such-host.invalid: " in err
    code, _, err = finish(multihost("--min-hosts", 3, path, hosts=hosts))
    assert code == 2
    assert "nothing was started, because of\n[tnt-jax] no-such-host.invalid: " in err
