"""The logs of every epoch sent to a server."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping

from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.log import logger

_TIMEOUT_S = 10.0


class RemoteMonitor(Callback):
    """Posts the logs of every epoch to a server, from the master; a server that does not answer costs a warning, not the run.

    Args:
        root: Address of the server.
        path: Where under the address to post.
        field: Form field that holds the logs as JSON.
        headers: Further HTTP headers.
        send_as_json: Whether to post the logs as JSON instead of in a form.
    """

    def __init__(
        self,
        root: str = "http://localhost:9000",
        path: str = "/publish/epoch/end/",
        field: str = "data",
        headers: Mapping[str, str] | None = None,
        send_as_json: bool = False,
    ) -> None:
        super().__init__()
        self.root, self.path, self.field, self.headers, self.send_as_json = root, path, field, dict(headers or {}), send_as_json

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Posts the logs and the epoch's number."""
        if not self.writes:
            return
        text = json.dumps({"epoch": epoch, **{name: float(value) for name, value in (logs or {}).items()}})
        body = text if self.send_as_json else urllib.parse.urlencode({self.field: text})
        kind = "application/json" if self.send_as_json else "application/x-www-form-urlencoded"
        request = urllib.request.Request(self.root + self.path, body.encode(), {"Content-Type": kind, **self.headers})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                pass
        except (urllib.error.URLError, TimeoutError) as error:
            logger.warning("RemoteMonitor could not post to %s: %s.", self.root + self.path, error)
