"""A Ray cluster over the hosts of the tests: a head on the first, a node on each of the others."""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from hosts import HOSTS, SSH_CONFIG
from processes import SCRIPTS

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default Ray's workers leave the cores to whatever else runs, such as other tests.
    "RAY_worker_niceness": "0",
    # By default Ray starts a worker for each CPU, whether it is used or not.
    "RAY_prestart_worker_first_driver": "0",
    # Otherwise a head asks for a token if its user has one, and a node that joins sends none.
    "RAY_AUTH_MODE": "disabled",
    # A node gives up after 30 seconds, which a busy machine may take.
    "RAY_raylet_start_wait_time_s": "120",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(SCRIPTS.parents[1]),
}
# Ray asks each node every 3 seconds whether it lives, waits 10 seconds for the answer, and takes the
# node for lost after 5 that have not come; the first of these is the time before the first question.
SOON_LOST = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class RayHosts:
    """A cluster with a head on the first host, and a node with `cpus` on each of the others.

    Attributes:
        address: The address of the cluster.
    """

    def __init__(self, hosts=HOSTS, *, cpus=1, head_cpus=0, **variables):
        with socket.create_server(("", 0)) as free:  # This is the first host.
            self._port = free.getsockname()[1]
        self.address = f"{hosts[0]}:{self._port}"
        self._hosts, self._variables = hosts, {**VARIABLES, **variables}
        self._cpus, self._head_cpus = cpus, head_cpus
        # The hosts share a file system, so each has a folder of its own. Sockets are there; their
        # paths must be shorter than 108 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="tnt-rayhosts-", dir="/tmp"))
        self._nodes = {}

    def start(self, *hosts):
        """Starts nodes on hosts, by default on all; returns when they are there."""
        for host in hosts or self._hosts:
            self._nodes[host] = self._start(host)
            if host == self._hosts[0]:
                self._await_start(host)
        for host in hosts or self._hosts[1:]:
            self._await_start(host)

    def end(self, *hosts):
        """Ends nodes on hosts that can be reached, by default on all, and waits for that."""
        ended = {host: self._nodes.pop(host) for host in hosts or list(self._nodes)}
        for host in ended:
            (self._folder / host / "up").unlink(missing_ok=True)
        for host, node in ended.items():
            node.wait(60)
            shutil.rmtree(self._folder / host, ignore_errors=True)
        if not self._nodes:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, host):
        """Starts a node; returns the ssh client."""
        folder = self._folder / host
        folder.mkdir()
        (folder / "up").touch()
        is_head = host == self._hosts[0]
        node = [f"--address={self.address}", f"--num-cpus={self._cpus}"]
        head = [
            "--head",
            f"--port={self._port}",
            f"--num-cpus={self._head_cpus}",
            "--include-dashboard=false",
            "--no-monitor",
        ]
        words = [
            "env", *(f"{name}={value}" for name, value in self._variables.items()),
            f"RAY_TMPDIR={folder}", sys.executable, str(SCRIPTS / "run_on_host.py"), f"{folder}/up",
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
            f"--node-ip-address={socket.gethostbyname(host)}", f"--temp-dir={folder}/ray",
            "--object-store-memory=100000000", "--include-log-monitor=false",
            *(head if is_head else node),
        ]  # fmt: skip
        with open(folder / "log", "w") as log:
            return subprocess.Popen(
                ["ssh", "-F", SSH_CONFIG, host, *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _await_start(self, host):
        deadline = time.monotonic() + 150
        while "Ray runtime started" not in (text := (self._folder / host / "log").read_text()):
            assert self._nodes[host].poll() is None, text
            assert time.monotonic() < deadline, f"no node on {host}: {text}"
            time.sleep(0.1)


@contextmanager
def ray_over_hosts(hosts=HOSTS, **options):
    """Starts a cluster, and ends it; yields it as `RayHosts`."""
    cluster = RayHosts(hosts, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
