"""The hosts of the tests over several hosts.

`TNT_TEST_HOSTFILE` lists at least two hosts that share this file system and have this Python at the
same path; the first is the one the tests run on. `TNT_TEST_SSH_CONFIG` is an ssh configuration that
reaches them. `TNT_TEST_CUT` and `TNT_TEST_MEND`, if set, are commands that, followed by a host
name, silently cut its network and put it back.
"""

import os
import shlex
import subprocess

import pytest

from tnt_jax.launch.remote.hosts import read_hostfile

HOSTFILE = os.environ.get("TNT_TEST_HOSTFILE", "")
SSH_CONFIG = os.environ.get("TNT_TEST_SSH_CONFIG", "")
HOSTS = [entry.name for entry in read_hostfile(HOSTFILE)] if HOSTFILE else []
SSH_ARGS = f"-F {shlex.quote(SSH_CONFIG)}"
needs_hosts = pytest.mark.skipif(
    not (HOSTFILE and SSH_CONFIG), reason="needs hosts: TNT_TEST_HOSTFILE and TNT_TEST_SSH_CONFIG"
)
needs_cuts = pytest.mark.skipif(
    not os.environ.get("TNT_TEST_CUT"),
    reason="needs a way to cut a host off: TNT_TEST_CUT, TNT_TEST_MEND",
)


def cut(host):
    """Cuts a host off, silently."""
    subprocess.run([*shlex.split(os.environ["TNT_TEST_CUT"]), host], check=True)


def mend(host):
    """Puts a host back that was cut off."""
    subprocess.run([*shlex.split(os.environ["TNT_TEST_MEND"]), host], check=True)


def finish(launcher, timeout=60):
    """Returns (exit code, standard output, standard error) of a launcher that ends by itself."""
    out, err = launcher.communicate(timeout=timeout)
    return launcher.returncode, out, err
