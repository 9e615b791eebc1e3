import os
import subprocess
import sys

import pytest

from tnt_jax.distributed.joining.join import keep_freed_memory

# Allocates and frees 32 MiB ten times, after two times that may grow the heap, and prints the pages
# that this cost.
CODE = """
import ctypes, resource, sys
import tnt_jax.distributed.joining.join as host_memory
print(host_memory.keep_freed_memory({}) if sys.argv[1] == "keep" else None)
def use():
    ctypes.memset(ctypes.create_string_buffer(32 << 20), 1, 32 << 20)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use(); use()
before = faults()
for _ in range(10):
    use()
print(faults() - before)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
    reason="needs glibc",
)
def test_freed_memory_comes_back_without_the_system():
    environ = {
        name: value
        for name, value in os.environ.items()
        if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
    }

    def run(mode):
        result = subprocess.run(
            [sys.executable, "-c", CODE, mode],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        return result.stdout.split()

    kept, faults = run("keep")
    assert kept == "True"
    assert 5 * int(faults) < int(run("plain")[1])


def test_what_the_user_chose_is_left_alone():
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "100000"})
