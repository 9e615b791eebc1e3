"""The questions of a launcher to a supervisor; each answer is plain data.

They are asked before, or instead of, starting processes.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tnt_jax.launch.doctor.examine import examine, read_clock
from tnt_jax.launch.facts import inspect_host
from tnt_jax.launch.leftovers import end_job, list_jobs

_CONNECT_TIMEOUT_S = 2.0
# Of the supervisor's process, which starts no job of its own.
_listening: dict[int, socket.socket] = {}


def answer(question: str, arguments: Mapping[str, Any]) -> Any:
    """Returns the answer to a question, which the launcher asks by name."""
    return _ANSWERS[question](**arguments)


def listen(port: int | None) -> int:
    """Listens on a port, any free one if None, until `stop_listening`, and returns its number.

    Raises:
        OSError: If the port is in use.
    """
    # On IPv4 and IPv6 if both exist, as JAX's coordinator does, and for all hosts of a large job at
    # once.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(
        ("", port or 0), family=family, dualstack_ipv6=both, backlog=4096
    )
    number = listener.getsockname()[1]
    _listening[number] = listener
    return number


def stop_listening() -> None:
    """Frees the ports taken by `listen`."""
    while _listening:
        _listening.popitem()[1].close()


def find_reachable(hosts: Sequence[str], port: int) -> list[str]:
    """Returns the names and addresses at which the port can be reached from here."""
    return [host for host in hosts if _can_connect(host, port)]


def _can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


_ANSWERS: dict[str, Callable[..., Any]] = {
    "inspect": inspect_host,
    "listen": listen,
    "stop_listening": stop_listening,
    "find_reachable": find_reachable,
    "examine": examine,
    "read_clock": read_clock,
    "list_jobs": list_jobs,
    "end_job": end_job,
}
