"""Jobs of several processes: their coordination service and their end."""

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import jax

from tnt_jax._jax.fallbacks import or_plain
from tnt_jax.job import Slot, check_signature, sign

# What a process calls before it aborts may take so long before the system ends it.
_LONGEST_LAST_CALL_S = 10
# Of SHA-256, in hexadecimal.
_SIGNATURE_DIGITS = 64


@or_plain(lambda: False, lost="JAX alone says if devices were opened before the job was joined.")
def backends_are_initialized() -> bool:
    """Returns whether JAX has already opened its devices, after which no job can be joined."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. No public question exists.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


# How calls of the coordination service are made, if not at once.
_caller = Slot[Callable[[Callable[[], Any]], Any] | None](lambda: None, lasts=True)


def call_service_by(caller: Callable[[Callable[[], Any]], Any]) -> None:
    """Has calls of the job's coordination service made by a function, as they may wait for ever."""
    _caller.set(caller)


class _CalledClient:
    """A client of the coordination service whose methods a function calls."""

    def __init__(self, client: Any, caller: Callable[[Callable[[], Any]], Any]) -> None:
        self._client, self._caller = client, caller

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **options: self._caller(partial(method, *args, **options))


class SignedStore:
    """The client of the coordination service, to which anyone who can connect can write.

    Values carry the signature of the job; another one raises a RuntimeError where it is read.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def key_value_set(self, key: str, text: str, *, allow_overwrite: bool = False) -> None:
        """Sets a key."""
        signature = sign(f"The key {key}", text.encode()).hex()
        self._client.key_value_set(key, f"{signature}{text}", allow_overwrite=allow_overwrite)

    def key_value_try_get(self, key: str) -> str:
        """Returns the value of a key, which must be there."""
        return self._checked(key, self._client.key_value_try_get(key))

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        """Returns the value of a key once it is there."""
        return self._checked(key, self._client.blocking_key_value_get(key, timeout_ms))

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        """Returns the keys below a folder, with their values."""
        entries = self._client.key_value_dir_get(folder)
        return [(key, self._checked(key, value)) for key, value in entries]

    def _checked(self, key: str, value: str) -> str:
        signature, text = b"", value[_SIGNATURE_DIGITS:]
        with suppress(ValueError):  # Nobody has signed it.
            signature = bytes.fromhex(value[:_SIGNATURE_DIGITS])
        check_signature(f"The key {key}", text.encode(), signature)
        return text


def coordination_client() -> SignedStore:
    """Returns the client of the job's coordination service, which needs no device."""
    client = _client()
    assert client is not None, "There is no coordination service before jax.distributed.initialize."
    caller = _caller.get()
    return SignedStore(client if caller is None else _CalledClient(client, caller))


def _found_client() -> Any:
    """Returns what can be asked for keys among the values that JAX's modules hold."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jax"):
            for state in list(vars(module).values()):
                for value in (state, *getattr(state, "__dict__", {}).values()):
                    if not isinstance(value, type) and hasattr(value, "key_value_set_bytes"):
                        return value
    return None


@or_plain(_found_client, lost="The coordination client is searched for; nothing is lost.")
def _client() -> Any:
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. The client has no public name.
    from jax._src import distributed

    return distributed.global_state.client


def value_of_key(client: Any, key: str) -> str | None:
    """Returns the value of a key of the coordination service at once, or None if it has none."""
    # Threads that wait for what may never come ask so again and again: a `blocking_key_value_get`
    # that runs out of time leaves 20 to 35 kB in the process (JAX 0.10.2).
    try:
        return _try_get(client, key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error) and "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


@or_plain(
    lambda client, key: client.blocking_key_value_get(key, 1),
    lost="A process that waits for others grows by some kB a second.",
)
def _try_get(client: Any, key: str) -> str:
    return client.key_value_try_get(key)


@or_plain(lambda: None, lost="A process that fails waits for its programs before it ends.")
def skip_cleanup() -> None:
    """Lets the interpreter end without waiting for programs that still run on the devices."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. What JAX registers for the end has no
    # public name.
    from jax._src import api

    atexit.unregister(api.clean_up)


@or_plain(
    lambda client, num_processes: None,
    lost="Process 0 does not wait for the others at the end, and ends them if they are behind.",
)
def await_disconnection(client: Any, num_processes: int) -> None:
    """Waits, on process 0, until all others have disconnected from the coordination service."""
    # Undocumented. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. Nothing public tells who is there
    # without opening devices. The service answers when every process that is connected has asked,
    # and the others do not ask.
    client.get_live_nodes(list(range(num_processes)))


@or_plain(lambda: True, lost="Processes that have lost process 0 end by SIGABRT.")
def coordinator_listens() -> bool:
    """Returns whether the coordination service takes connections."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. The address has no public name.
    from jax._src import distributed

    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False


class _Recoverable:
    """Stands for jaxlib where JAX connects to the coordination service."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def get_distributed_runtime_client(self, *args: Any, **options: Any) -> Any:
        """Returns a client whose loss of the service need not end the process."""
        # By default that aborts the process, within a message of the log. With a callback, the
        # conversion of the error fails (std::bad_cast) outside of it, and `stop_threads_that_fail`
        # can stop the thread of the client alone.
        options["missed_heartbeat_callback"] = lambda *_: None
        return self._plain.get_distributed_runtime_client(*args, **options)


@or_plain(lambda: None, lost="An elastic job ends when a process is lost.")
def outlive_service() -> None:
    """Lets this process outlive the coordination services that it connects to from here on."""
    # Private. Checked with JAX 0.12.0. jax.distributed.initialize takes no callback.
    from jax._src import distributed

    module: Any = distributed
    if not isinstance(module._jax, _Recoverable):
        module._jax = _Recoverable(module._jax)


@or_plain(lambda: None, lost="An elastic job ends when a process is lost.")
def leave_job() -> None:
    """Closes the devices and forgets the coordination service, so that another can be joined.

    It waits for nobody, as others may be lost. All arrays and compiled programs become useless.
    """
    # Private. Checked with JAX 0.12.0. jax.distributed.shutdown waits for the service, which may
    # have been in a process that is lost.
    from jax._src import distributed
    from jax.extend.backend import clear_backends

    clear_backends()
    state = distributed.global_state
    # Their end could wait for the others, or end them.
    for left in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
    state.client = state.service = state.preemption_sync_manager = None
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None


@cache
def stop_threads_that_fail() -> None:
    """Has threads of C++ wait for ever that would end this process by an uncaught error."""
    # The handler of jaxlib's library of C++; std::set_terminate, by its name in the library.
    set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    set_terminate.restype = ctypes.c_void_p
    set_terminate.argtypes = [ctypes.c_void_p]

    @ctypes.CFUNCTYPE(None)
    def handle() -> None:
        while threading.current_thread() is not threading.main_thread():
            time.sleep(_LONGEST_LAST_CALL_S)
        ctypes.CFUNCTYPE(None)(before)()

    def end() -> None:
        # Once Python has ended, `handle` cannot be called.
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
        del handles[:]

    handles = [handle]
    before = set_terminate(ctypes.cast(handle, ctypes.c_void_p))
    atexit.register(end)


def before_abort(function: Callable[[], None]) -> Callable[[], None]:
    """Has a function called when C++ aborts this process; returns what undoes that.

    JAX aborts a process whose coordination service has gone, from a thread of its own. The function
    ends the process, or returns if that is another abort, which then goes on.
    """
    # JAX's client takes a callback for this, but fails to convert the error that it passes to it
    # (std::bad_cast, checked with JAX 0.10.2), and Python's signal handlers run in the main thread
    # alone, after the abort. Can go when jax.distributed.initialize takes a working callback.
    process = ctypes.CDLL(None)
    process.signal.restype = ctypes.c_void_p
    process.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    pid = os.getpid()

    def restore() -> None:
        if os.getpid() == pid:
            process.signal(signal.SIGABRT, before)
            kept.clear()

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handle(_: int) -> None:
        # An abort within malloc holds its lock, for which the function may wait.
        process.signal(signal.SIGALRM, signal.SIG_DFL)
        process.alarm(_LONGEST_LAST_CALL_S)
        function()
        process.alarm(0)
        process.signal(signal.SIGABRT, before)
        signal.raise_signal(signal.SIGABRT)

    before = process.signal(signal.SIGABRT, ctypes.cast(handle, ctypes.c_void_p))
    kept = [handle]  # C holds no reference.
    return restore
