"""The talk between launcher and supervisor, over connections that are not as clean as one would
wish.
"""

import json
import os
import shlex
import signal
from types import SimpleNamespace

import pytest

from tnt_jax.launch.remote.connection import (
    GREETING,
    Connection,
    Lines,
    Outbox,
    encode,
    ssh_command,
    supervisor_command,
)
from tnt_jax.launch.remote.session import HostError, Session, how_it_ended
from tnt_jax.launch.run import _raising_on_signals


def connect(before="", *, host="h"):
    connection = Connection(
        host, ["sh", "-c", f"{before}\nexec {shlex.join(supervisor_command())}"], is_remote=True
    )
    return connection, Session([host], lambda host: connection, grace_period_s=1)


@pytest.fixture
def close():
    opened = []
    yield opened.append
    for connection in opened:
        connection.abort()


def test_hosts_are_released_when_the_last_process_that_was_to_join_cannot_be_started():
    sent, lost = [], []
    host = SimpleNamespace(host="h", finished=False, send=sent.append)
    session = Session([], connect, grace_period_s=1)
    session._connections, session._running = {"h": host}, {1: "h"}
    session._membership = SimpleNamespace(
        is_joining=lambda rank: True, lost=lambda rank, how: lost.append((rank, how))
    )
    session._on_refused(host, rank=1, reason="no such folder")
    session.close()
    assert lost == [(1, "cannot be started: no such folder")]
    assert sent == ["release"]


def test_a_host_that_cannot_be_used_again_is_named_once_and_when_the_reason_changes(close, capsys):
    silent = "exec cat >/dev/null"
    commands = iter(["exit 3", *2 * ["echo no room >&2"], *2 * [silent], "echo no disk >&2"])
    tries = []

    def next_connection(host):
        command = next(commands, f"exec {shlex.join(supervisor_command())}")
        tries.append((Connection(host, ["sh", "-c", command], is_remote=False), command))
        close(tries[-1][0])
        return tries[-1][0]

    session = Session(["h"], next_connection, grace_period_s=1)
    returned = []
    session._membership = SimpleNamespace(
        lost_host=lambda host, reason: True,
        may_return=lambda host: True,
        returned_host=returned.append,
        tick=lambda: None,
    )
    session._running = {1: "h"}
    while not returned:
        session._turn()
        connection, command = tries[-1]
        if connection.closed or command == silent:
            session._again_at["h"] = 0.0
        session._keep_time()
    session.close()
    again = "[tnt-jax] h is tried again every 15 seconds, but cannot be used:"
    assert capsys.readouterr().err.splitlines() == [
        "[tnt-jax] Lost h with rank 1: its supervisor ended with code 3",
        f"{again} no room",
        f"{again} it does not answer",
        f"{again} no disk",
        "[tnt-jax] h can be reached again.",
    ]


def test_login_scripts_may_print_what_they_like(close):
    connection, session = connect(
        "echo Welcome; echo '{\"kind\": \"answer\"}'; printf 'no line end'; echo careful >&2; echo"
    )
    close(connection)
    assert session.ask("find_reachable", {"hosts": [], "port": 1}, timeout_s=10) == {"h": []}


def test_what_was_printed_is_the_reason_when_no_supervisor_comes(close):
    connection, session = connect("echo 'This account is closed.'; exit 1")
    close(connection)
    with pytest.raises(HostError, match=r"h: This account is closed."):
        session.ask("read_clock", {}, timeout_s=10)


def test_host_that_does_not_answer_is_named(close):
    connection, session = connect("sleep 60")
    close(connection)
    with pytest.raises(HostError, match=r"h: no answer within 0.5 seconds"):
        session.ask("read_clock", {}, timeout_s=0.5)


def test_error_on_the_host_is_the_answer(close):
    connection, session = connect()
    close(connection)
    with pytest.raises(HostError, match="h: KeyError: 'no such question'"):
        session.ask("no such question", {}, timeout_s=10)
    assert list(session.ask("read_clock", {}, timeout_s=10)) == ["h"]


def test_supervisor_ends_when_its_session_is_hung_up(close):
    connection, session = connect()
    close(connection)
    pid = (
        session.ask("find_reachable", {"hosts": [], "port": 1}, timeout_s=10)
        and connection._popen.pid
    )
    os.kill(pid, signal.SIGHUP)
    assert connection.wait(10) == 0


def test_host_name_cannot_become_an_option_of_ssh():
    command = ssh_command("-oProxyCommand=x", ["-p", "2222"])
    assert command[:3] == ["ssh", "-p", "2222"]
    assert command[-3:-1] == ["--", "-oProxyCommand=x"]
    assert shlex.split(command[-1]) == ["exec", *supervisor_command()]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_lines_come_out_whole_whatever_pieces_they_arrive_in(size):
    stream = b"one\n\ntwo\nrest"
    lines = Lines()
    found = [
        line
        for start in range(0, len(stream), size)
        for line in lines.feed(stream[start : start + size])
    ]
    assert found == [b"one\n", b"\n", b"two\n"]
    assert lines.flush() == [b"rest"]
    assert lines.flush() == []


def test_message_survives_the_way():
    data = bytes(range(256)).decode("latin-1")
    line = encode("output", rank=3, data=data)
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"kind": "output", "rank": 3, "data": data}


def test_outbox_keeps_what_a_full_pipe_does_not_take():
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    outbox = Outbox(write_fd)
    outbox.put(b"x" * 200_000)
    outbox.flush()
    assert 0 < len(outbox) < 200_000
    received = 0
    while received < 200_000:
        received += len(os.read(read_fd, 1 << 20))
        outbox.flush()
    assert len(outbox) == 0
    os.close(read_fd)
    outbox.put(b"x")
    outbox.flush()
    assert outbox.is_closed
    os.close(write_fd)


def test_the_launcher_ignores_the_hangup_that_nohup_has_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        session = Session([], connect, grace_period_s=1)
        with _raising_on_signals():
            restore = session.watch_signals()
            os.kill(os.getpid(), signal.SIGHUP)
            session._turn()
            restore()
        session.close()
        assert session._caught is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_message_of_a_host_that_was_given_up_is_dropped(close):
    ends = encode("exit", rank=1, pid=7, code=0, tail="", memory_kills=0).decode()
    connection = Connection("h", ["printf", "%s%s", GREETING.decode(), ends], is_remote=True)
    close(connection)
    assert connection.wait(20) == 0
    session = Session(["h"], lambda host: connection, grace_period_s=1)
    session._membership = SimpleNamespace(lost_host=lambda host, reason: True)
    session._running = {1: "h"}
    session._lose(connection, "it has been silent")
    while session._selector.get_map():
        session._turn()
    session.close()
    assert (session._running, session._exit_code) == ({}, 0)


@pytest.mark.parametrize(
    ("code", "how", "goes_on"),
    [
        (1, "failed with exit code 1", False),
        (137, "was ended by signal 9 (SIGKILL)", True),
        (163, "was ended by signal 35", True),
        (255, "failed with exit code 255", False),
    ],
)
def test_an_exit_code_that_no_signal_has_is_an_error_of_the_script(code, how, goes_on):
    session = Session([], connect, grace_period_s=1)
    session._membership = SimpleNamespace(
        is_joining=lambda rank: False, lost=lambda rank, how: True
    )
    assert how_it_ended(code) == how
    assert session._goes_on_without(1, code, "report") == goes_on
    session.close()
