"""Sends the logs of each epoch to a server."""

import http.client
import json
import urllib.parse
import urllib.request
from collections.abc import Mapping

import numpy as np

from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.log import logger

_TIMEOUT_S = 10.0


class RemoteMonitor(Callback):
    """Posts the logs of each epoch to a server, from the master.

    If the server does not answer, or answers with an error, a warning is logged and training
    continues.

    Args:
        root: Address of the server.
        path: Path under the address to which to post.
        field: Form field that holds the logs as JSON.
        headers: Further HTTP headers.
        send_as_json: Whether to post the logs as JSON instead of in a form.

    Raises:
        ValueError: If the address does not begin with http:// or https://.
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
        if not root.lower().startswith(("http://", "https://")):
            # Raised here, on all processes: posting fails on the master alone.
            raise ValueError(
                f"root must be an address that begins with http:// or https://, but is {root!r}."
            )
        self.root = root
        self.path = path
        self.field = field
        self.headers = dict(headers or {})
        self.send_as_json = send_as_json

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Posts the logs and the number of the epoch."""
        if not self.writes:
            return
        # A metric of several thresholds or classes has a vector of results.
        text = json.dumps(
            {
                "epoch": epoch,
                **{name: np.asarray(value).tolist() for name, value in (logs or {}).items()},
            }
        )
        body = text if self.send_as_json else urllib.parse.urlencode({self.field: text})
        kind = "application/json" if self.send_as_json else "application/x-www-form-urlencoded"
        request = urllib.request.Request(
            self.root + self.path, body.encode(), {"Content-Type": kind, **self.headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                pass
        except (OSError, http.client.HTTPException) as error:
            logger.warning("RemoteMonitor could not post to %s: %s.", self.root + self.path, error)
