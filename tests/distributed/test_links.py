"""Bytes that processes send one another beside their steps."""

import socket
from types import SimpleNamespace

import pytest
from processes import free_address, launch

from tnt_jax.distributed.host import links as module

EXCHANGE = """
import socket, threading
import jax, jax.numpy as jnp, numpy as np, pytest, tnt_jax as tnt
from tnt_jax.distributed.host import links as module
from tnt_jax.distributed.host.links import Links

process = tnt.get_process_index()
members = (0, 2, 3)
if process in members:
    links = Links(members, "test values")
    # Larger than the buffers of a connection, both ways at once, and of unequal sizes.
    sizes = [9_000_000 + process, 0, process]
    may_go_on = threading.Event()
    def first():
        may_go_on.wait()
        return bytes([process]) * sizes[0]
    links.post(first)
    for size in sizes[1:]:
        links.post(lambda size=size: bytes([process]) * size)
    # Programs run while the messages are on their way: nobody has taken, or even made, them.
    x = jnp.ones((64, 64))
    for _ in range(5):
        x = jax.jit(lambda x: x @ x / 64)(x)
    assert float(x.sum()) == 64 * 64
    assert links.sent_bytes == 0
    may_go_on.set()
    for number in range(3):
        found = links.take()
        for member, message in zip(members, found, strict=True):
            assert len(message) == [9_000_000 + member, 0, member][number]
            assert set(message) <= {member}
    assert links.sent_bytes == 2 * (sum(sizes) + 3 * 8)
    links.close()
    if process == 3:
        with pytest.raises(ConnectionError, match="of process 0 cannot be exchanged .it was closed."):
            links.take()
tnt.barrier()

# A stranger that knocks gets no place.
if process < 2:
    connect = module._connect
    def knock(entry, *others):
        host, port, _ = entry.split(" ")
        stranger = socket.create_connection((host, int(port)))
        stranger.sendall(bytes(36))
        return connect(entry, *others)
    module._connect = knock
    links = Links((0, 1), "values again")
    links.post(lambda: b"%d" % process)
    assert [bytes(message) for message in links.take()] == [b"0", b"1"]
tnt.barrier()
print("done", process, flush=True)
"""


@pytest.mark.multiprocess
def test_messages_come_in_order_beside_the_steps(tmp_path):
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    result = launch(4, script, flags=["--output-on-all-devices"], timeout_s=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("done") == 4
    assert result.stderr.count("A connection for values again was refused") == 1
    assert "different values of TNT_JOB_SECRET" in result.stderr


@pytest.mark.parametrize("fails", ["greeting", "next"])
def test_what_was_connected_is_closed_if_links_cannot_be_made(monkeypatch, fails):
    def fail(*_):
        raise ConnectionError("no secret")

    monkeypatch.setattr(module.jax, "process_index", lambda: 2)
    monkeypatch.setattr(module, "own_address", lambda: "127.0.0.1")
    service = SimpleNamespace(key_value_set=lambda *_: None)
    monkeypatch.setattr(module._jax, "coordination_client", lambda: service)
    if fails == "greeting":
        monkeypatch.setattr(module, "sign", fail)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"0": server.getsockname()[1], "1": free_address().split(":")[1]}
        monkeypatch.setattr(
            module, "read_key", lambda key, what: f"127.0.0.1 {ports[key[-1]]} nonce"
        )
        # The error keeps the frames that it passed, and what they hold.
        with pytest.raises(ConnectionError, match="Process 2 cannot connect to process") as _raised:
            module.Links((0, 1, 2), "test values")
        link, _ = server.accept()
        with link:
            link.settimeout(5)
            assert len(link.recv(36)) == (0 if fails == "greeting" else 36)
            assert link.recv(1) == b""
