"""RemoteMonitor sends what that of Keras sends, and survives its server."""

import http.server
import json
import logging
import socket
import threading

import keras
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax import callbacks


class _Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.posts.append((self.path, self.headers["Content-Type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("send_as_json", [False, True])
def test_remote_monitor_sends_what_keras_sends(send_as_json):
    server = http.server.HTTPServer(("127.0.0.1", 0), _Server)
    server.posts = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}"
    for module in (keras.callbacks, callbacks):
        monitor = module.RemoteMonitor(root, path="/here", send_as_json=send_as_json)
        monitor.on_epoch_end(3, {"loss": np.float32(0.5), "accuracy": 0.25})
    server.shutdown()
    (path, kind, body), ours = server.posts
    assert ours[:2] == (path, kind)
    if send_as_json:
        assert (
            json.loads(ours[2]) == json.loads(body) == {"epoch": 3, "loss": 0.5, "accuracy": 0.25}
        )
    else:
        assert ours[2] == body


@pytest.fixture
def warnings_seen(caplog):
    tnt.init()
    logger = logging.getLogger("tnt_jax")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_remote_monitor_survives_a_silent_server(warnings_seen):
    callbacks.RemoteMonitor("http://127.0.0.1:9").on_epoch_end(0, {"loss": 1.0})
    assert "could not post to http://127.0.0.1:9" in warnings_seen.text


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 500 No\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ftp:/\r\n\r\n",
    ],
)
def test_remote_monitor_survives_a_bad_answer(answer, warnings_seen):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply():
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        monitor = callbacks.RemoteMonitor(f"http://127.0.0.1:{server.getsockname()[1]}")
        monitor.on_epoch_end(0, {"loss": 1.0, "recall": np.array([0.5, 1.0])})
        thread.join()
    assert "RemoteMonitor could not post" in warnings_seen.text


def test_remote_monitor_refuses_an_address_that_it_cannot_post_to():
    with pytest.raises(
        ValueError,
        match=r"root must be an address that begins with http:// or https://, but is "
        r"'localhost:9000'",
    ):
        callbacks.RemoteMonitor("localhost:9000")
