"""Jobs of several processes: their coordination service and their end."""

import atexit
from typing import Any

import jax


def backends_are_initialized() -> bool:
    """Returns whether JAX has already opened its devices, after which no job can be joined."""
    # Private. Checked with JAX 0.10.0 and 0.10.2. No public question exists.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def is_distributed() -> bool:
    """Returns whether `jax.distributed.initialize` has run in this process."""
    return jax.distributed.is_initialized()


def coordination_client() -> Any:
    """Returns the client of the job's coordination service.

    Its key/value store and its barriers need no device.
    """
    # Private. Checked with JAX 0.10.0 and 0.10.2. The client has no public name.
    from jax._src import distributed

    client = distributed.global_state.client
    assert client is not None, (
        "The coordination service exists after jax.distributed.initialize only."
    )
    return client


def skip_cleanup() -> None:
    """Lets the interpreter end without waiting for programs that still run on the devices."""
    # Private. Checked with JAX 0.10.0 and 0.10.2. What JAX registers for the end has no public
    # name.
    from jax._src import api

    atexit.unregister(api.clean_up)


def await_disconnection(client: Any, num_processes: int) -> None:
    """Waits, on process 0, until all others have disconnected from the coordination service."""
    # Undocumented. Checked with JAX 0.10.0 and 0.10.2. Nothing public tells who is there without
    # opening devices. The service answers when every process that is connected has asked, and the
    # others do not ask.
    client.get_live_nodes(list(range(num_processes)))
