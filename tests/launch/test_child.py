"""A process that a supervisor has started: its log file, and its line to the launcher."""

import sys
from dataclasses import asdict

import pytest

from tnt_jax.launch.planning.plan import Process
from tnt_jax.launch.supervisor import Child

READS_LATE = """
import os, socket, time
link = socket.socket(fileno=int(os.environ["TNT_ELASTIC_FD"]))
time.sleep(0.5)
found = b""
while not found.endswith(b"\\n"):
    found += link.recv(1 << 16)
print(len(found))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a Python program as the process of a rank."""

    def start(program, *, environment=None, is_elastic=False):
        process = Process(
            rank=0,
            local_rank=0,
            host="localhost",
            command=(sys.executable, "-c", program),
            cwd=str(tmp_path),
            environment=environment or {},
            exports=(),
            shown=(),
            log_file=str(tmp_path / "logs" / "rank0.log"),
            is_elastic=is_elastic,
        )
        return Child(asdict(process))

    return start


def read_to_end(child):
    """Returns the standard output of a process until it ends."""
    found = b""
    while (data := child.read("stdout")) is not None:
        found += data
    child._popen.wait()
    child.ended(child.pid, 0)
    return found


def test_the_log_of_a_replacement_follows_that_of_the_lost_process(start, tmp_path):
    read_to_end(start("print('of an earlier job')"))
    read_to_end(start("print('lost')"))
    read_to_end(start("print('joins')", environment={"TNT_ELASTIC_JOINS": "1"}))
    assert (tmp_path / "logs" / "rank0.log").read_text() == "lost\njoins\n"


def test_a_line_that_is_longer_than_buffers_arrives_whole(start):
    child = start(READS_LATE, is_elastic=True)
    child.tell("x" * (1 << 20) + "\n")
    assert int(read_to_end(child)) == (1 << 20) + 1


def test_a_process_that_does_not_read_holds_up_nobody(start):
    child = start("import time; time.sleep(1000)", is_elastic=True)
    child.tell("x" * (1 << 20) + "\n")
    assert child.hear() == []
    child._popen.kill()
    read_to_end(child)
