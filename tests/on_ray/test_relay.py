"""The relay between the launcher and the broker, as a program on a real socket."""

import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tnt_jax.on_ray.relay import HEADER, read_exactly


@contextmanager
def relay_of(tmp_path, number=3):
    """Starts a relay; yields it with the broker's end of its socket, once it has said its number."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(20)
        program = subprocess.Popen(
            [sys.executable, "-m", "tnt_jax.on_ray.relay", path, str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            peer, _ = server.accept()
            peer.settimeout(20)
            assert read_exactly(peer, 2) == f"{number}\n".encode()
            yield program, peer
        finally:
            program.kill()
            program.wait()


def frame(kind, data):
    return HEADER.pack(kind, len(data)) + data


def test_streams_and_exit_code_pass_the_relay(tmp_path):
    with relay_of(tmp_path) as (program, peer):
        large = bytes(range(256)) * 4000
        program.stdin.write(b"to the node\0")
        program.stdin.flush()
        assert read_exactly(peer, 12) == b"to the node\0"
        peer.sendall(frame(b"e", b"a complaint") + frame(b"o", b"") + frame(b"o", large))
        peer.sendall(frame(b"x", b"37"))
        out, err = program.communicate(timeout=20)
        assert (out, err, program.returncode) == (large, b"a complaint", 37)


def test_the_end_of_the_input_is_passed_on_while_output_still_comes(tmp_path):
    with relay_of(tmp_path) as (program, peer):
        program.stdin.close()
        assert read_exactly(peer, 1) == b""
        peer.sendall(frame(b"o", b"last words") + frame(b"x", b"0"))
        assert program.stdout.read() == b"last words"
        assert program.wait(20) == 0


@pytest.mark.parametrize("torn", [b"", b"o\0\0", frame(b"o", b"half")[:-2]])
def test_a_broker_that_dies_ends_the_relay_with_a_reason(tmp_path, torn):
    with relay_of(tmp_path) as (program, peer):
        peer.sendall(torn)
        peer.close()
        _, err = program.communicate(timeout=20)
        assert program.returncode == 1
        assert b"The connection to the Ray cluster has ended." in err
