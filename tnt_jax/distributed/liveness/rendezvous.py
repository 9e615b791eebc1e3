"""A barrier of all processes, with a text from each, through the job's coordination service.

It needs no device, and reports which processes are missing or came from another call.
"""

import atexit
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypeVar

import jax

from tnt_jax import _jax
from tnt_jax.distributed.elastic import raise_if_ended
from tnt_jax.distributed.liveness import phases
from tnt_jax.job import Slot

_KEY = "tnt_jax/meeting"
# The interval at which a waiting process checks whether waiting has become pointless.
_CHECK_S = 1.0
# The longest interval between two questions, in a small job.
_TICK_S = 0.25
# The shortest, and by how much of the time so far it grows: so much later than it comes, at most,
# is an answer seen.
_SHORTEST_TICK_S, _LATER = 0.0005, 1 / 8
# For each process of the job, as all of them ask the same service.
_PER_PROCESS_S = 0.00005
_alone: ContextVar[str] = ContextVar("tnt_jax_alone", default="")
Role = Literal["alone", "joinable", "joins"]
_T = TypeVar("_T")
# How many meetings there were, by the processes that met.
_numbers = Slot[Counter[tuple[int, ...]]](Counter)
# Of the process, not of its job: the interpreter ends once, and waits for the threads of any job.
_is_ending = threading.Event()
_waiting_threads: set[int] = set()


@contextmanager
def acting_alone(who: str) -> Iterator[None]:
    """Refuses meetings within the block, to which the others would not come; `who` runs alone."""
    token = _alone.set(who)
    try:
        yield
    finally:
        _alone.reset(token)


def check_not_alone(call: str) -> None:
    """Raises a RuntimeError if this process acts alone, while a public call needs every process."""
    if who := _alone.get():
        raise RuntimeError(
            f"{call} needs every process, but {who} runs on process {jax.process_index()} alone. "
            "Pass it to fit on every process, without OnMaster."
        )


def read_key(
    key: str,
    what: str,
    *,
    is_over: Callable[[], bool] = lambda: False,
    check: Callable[[], None] = lambda: None,
) -> str | None:
    """Returns the value of a key of the coordination service once it exists, None once `is_over`.

    Warnings say that the process waits for `what`; `check` is called every second, and raises if
    the others will not come, as this does if one of them has ended its script.
    """
    ask = partial(_jax.value_of_key, _jax.coordination_client(), key)
    return _await(ask, what, is_over, check)


def _await(
    ask: Callable[[], _T | None], what: str, is_over: Callable[[], bool], check: Callable[[], None]
) -> _T | None:
    checked_at = time.monotonic()

    def is_pointless() -> bool:
        nonlocal checked_at
        if time.monotonic() - checked_at >= _CHECK_S:
            if left_alone := phases.here().left_alone:
                raise RuntimeError(f"{left_alone} Every process must make the same calls.")
            check()
            checked_at = time.monotonic()
        return is_over()

    with phases.waiting(what):
        return _ask_until(ask, is_pointless)


def _ask_until(ask: Callable[[], _T | None], is_over: Callable[[], bool]) -> _T | None:
    """Asks the service again and again, until it has an answer or `is_over` is true."""
    shortest_s = max(_SHORTEST_TICK_S, _PER_PROCESS_S * jax.process_count())
    longest_s = max(_TICK_S, jax.process_count() / 200)
    began_at = time.monotonic()
    if threading.current_thread() is not threading.main_thread():
        # None may be in the service at the interpreter's exit.
        _waiting_threads.add(threading.get_ident())
    try:
        while not (is_over() or _is_ending.is_set()):
            raise_if_ended()
            if (value := ask()) is not None:
                return value
            waited_s = time.monotonic() - began_at
            _is_ending.wait(min(max(shortest_s, _LATER * waited_s), longest_s))
        return None
    finally:
        _waiting_threads.discard(threading.get_ident())


@atexit.register
def _end_waiting() -> None:
    """Ends the threads that wait for other processes when the script ends."""
    # A call to the service that is cut short aborts the process.
    _is_ending.set()
    deadline = time.monotonic() + 3 * _CHECK_S
    while _waiting_threads and time.monotonic() < deadline:
        time.sleep(0.01)


def meet(
    call: str,
    text: str = "",
    *,
    members: Sequence[int] | None = None,
    timeout_s: float | None = None,
    role: Role = "alone",
) -> list[str]:
    """Returns the texts of all processes, by process, once each of them has made the same call.

    All members, by default all processes, must call it equally often, from one thread at a time. A
    process whose role is `"joins"` follows whatever call the others make, which must be
    `"joinable"`. A RuntimeError names processes: on all, if their calls differ; on this one, if not
    all came in time, or if it is known to act alone.
    """
    process = jax.process_index()
    together = tuple(range(jax.process_count()) if members is None else members)
    if len(together) == 1:
        return [text]
    check_not_alone(call)
    number = _numbers.get()[together]
    _numbers.get()[together] += 1
    if len(together) == jax.process_count():
        phases.here().meetings = number + 1
    own = json.dumps([call, phases.here().calls, text, role])
    began_at = time.monotonic()
    with phases.among(() if members is None else together):
        told = _exchange(together, number, call, own, timeout_s)
    meant = {member: json.loads(text) for member, text in zip(together, told, strict=True) if text}
    came = {member: entry for member, entry in meant.items() if entry[3] != "joins"}
    differences = _differences({member: _in_words(*entry[:2]) for member, entry in came.items()})
    if len(meant) < len(together):
        # The first, which may leave no entry, is missing if nobody else is.
        missing = [member for member in together[1:] if member not in meant] or [together[0]]
        waited = (
            f"came to {call} when the others had given up waiting for it"
            if process in missing
            else f"waited {time.monotonic() - began_at:.1f} s in {call} for process(es) "
            f"{listed(missing)} of {len(together)}"
        )
        raise RuntimeError(
            f"Process {process} {waited}. Every process must call it; look for a process that "
            f"failed or took another branch. {differences}".rstrip()
        )
    if differences:
        raise RuntimeError(differences)
    if any(entry[3] == "alone" for entry in came.values()) and len(came) < len(meant):
        raise RuntimeError(
            f"Process(es) {listed([member for member in meant if member not in came])} have called "
            f"join, and process(es) {listed(list(came))} came to {next(iter(came.values()))[0]}, "
            "which needs all of them. Those that have joined take part in all_reduce and "
            "all_gather_rows alone."
        )
    return [text for _, _, text, _ in meant.values()]


def _exchange(
    together: tuple[int, ...], number: int, call: str, own: str, timeout_s: float | None
) -> list[str | None]:
    """Returns what each process has said; None for those that have not come in time."""
    first = together[0]
    process = jax.process_index()
    folder = _folder(together, number)
    client = _jax.coordination_client()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    has_said: list[bool] = []

    def is_over() -> bool:
        return deadline is not None and time.monotonic() > deadline

    def check() -> None:
        # Where the first process is, nobody needs to know as long as all come soon.
        if process == first and not has_said:
            has_said.append(True)
            client.key_value_set(f"{folder}/{first}", own)
        _raise_if_elsewhere(together, number, call)

    def said() -> list[str | None]:
        texts = dict(client.key_value_dir_get(folder))
        return [own if other == process else texts.get(f"{folder}/{other}") for other in together]

    if process != first:
        client.key_value_set(f"{folder}/{process}", own)
        found = read_key(f"{folder}/all", call, is_over=is_over, check=check)
        if found is None:
            return said()
        client.key_value_delete(f"{folder}/{process}")
        return json.loads(found)

    def all_said() -> list[str | None] | None:
        texts = said()
        return None if None in texts else texts

    # One process collects for all, so that the messages are as many as the processes, not as
    # their square.
    told = _await(all_said, call, is_over, check) or said()
    client.key_value_set(f"{folder}/all", json.dumps(told))
    if has_said:
        client.key_value_delete(f"{folder}/{first}")
    if number:
        # Who has come to this meeting has read what was collected in the one before.
        client.key_value_delete(f"{_folder(together, number - 1)}/all")
    return told


def _raise_if_elsewhere(together: tuple[int, ...], number: int, call: str) -> None:
    """Raises a RuntimeError, on all concerned, if another process waits for this one elsewhere."""
    # Where process sets differ, two processes can wait for each other in different meetings. The
    # one in the smaller meeting then goes to the other, where calls are compared.
    process, client = jax.process_index(), _jax.coordination_client()
    everybody = tuple(range(jax.process_count()))
    for key, _ in client.key_value_dir_get(_KEY):
        name, next_number, other = key.removeprefix(f"{_KEY}/").split("/")
        elsewhere = everybody if name == "all" else tuple(map(int, name.split("-")))
        waits_here = (
            other != "all"
            and int(other) in together
            and process in elsewhere
            and int(other) != process
            and int(next_number) == _numbers.get()[elsewhere]
        )
        if waits_here and (len(elsewhere), elsewhere) > (len(together), together):
            # As if it had not come: it may come again.
            client.key_value_delete(f"{_folder(together, number)}/{process}")
            _numbers.get()[together] = number
            meet(f"{call} among processes {listed(list(together))}", members=elsewhere)


def _folder(together: tuple[int, ...], number: int) -> str:
    is_everybody = len(together) == jax.process_count()
    return f"{_KEY}/{'all' if is_everybody else '-'.join(map(str, together))}/{number}"


def _in_words(call: str, calls: list[str]) -> str:
    """Returns a call and the public calls that enclose it, the outermost last."""
    outer = calls[:-1] if calls and call.startswith(calls[-1]) else calls
    return " in ".join([call, *reversed(outer)])


def _differences(names: Mapping[int, str]) -> str:
    """Returns what is wrong unless all processes made the same call, within the same calls."""
    groups: dict[str, list[int]] = {}
    for process, name in names.items():
        groups.setdefault(name, []).append(process)
    if len(groups) <= 1:
        return ""
    told = "; ".join(
        f"process(es) {listed(processes)}: {name}" for name, processes in groups.items()
    )
    return (
        f"The processes came to different calls: {told}. Every process must make the same calls in "
        "the same order, not under `if tnt.is_master_rank():`, and pass the same callbacks: those "
        "that write files do so on the master only. See "
        "docs/launching.md#calls-that-all-processes-must-make."
    )


def listed(processes: Sequence[Any]) -> str:
    """Returns processes, or their numbers, in words, of many the first eight."""
    more = f" and {len(processes) - 8} more" if len(processes) > 8 else ""
    return ", ".join(map(str, processes[:8])) + more
