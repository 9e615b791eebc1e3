"""Python objects and training states between processes, outside of steps.

Objects travel as pickles, which can run any code when they are read. They are signed with the
secret of the job; processes without one pass on plain values alone, as JSON.
"""

import json
import pickle
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.host.collectives import broadcast
from tnt_jax.distributed.host.exchange import collected, exclusive, gather, raise_first
from tnt_jax.distributed.joining.process_sets import ProcessSet, members_of, process_of
from tnt_jax.distributed.liveness.rendezvous import meet
from tnt_jax.job import check_signature, secret, sign

_SIGNATURE_BYTES = 32
_NEEDED = (
    "Other objects can run code, so the processes need a secret to sign them: start the job by "
    "tnt-jax, or set TNT_JOB_SECRET to the same random text for all processes. See "
    "docs/launching.md#a-trusted-network."
)


def check_secret(call: str) -> None:
    """Raises a RuntimeError if a public call that passes on objects lacks what signs them."""
    if jax.process_count() > 1 and not secret.get():
        raise RuntimeError(f"{call} passes on more than plain values between processes. {_NEEDED}")


def all_gather_object(value: Any, *, process_set: ProcessSet | None = None) -> list[Any]:
    """Returns the objects of all processes, by process, on every process.

    Args:
        value: Anything that can be pickled; of each process another type if need be. Processes
            without a secret (docs/launching.md) send plain values only.
        process_set: The ranks among whose processes this happens; all by default.

    Raises:
        Exception: What pickle raises on a process, there; a RuntimeError that quotes it on the
            others.
        TypeError: If the processes have no secret, and the value is no plain one.
    """
    members = members_of(process_set)
    return _exchanged("all_gather_object", value, members, members)


def broadcast_object(
    value: Any = None, *, root_rank: int = 0, process_set: ProcessSet | None = None
) -> Any:
    """Returns the object that the process of rank `root_rank` passes, on every process.

    Args:
        value: Anything that can be pickled, without a secret (docs/launching.md) plain values only;
            of processes other than the root's it is not looked at.
        root_rank: A rank of the job.
        process_set: The ranks among whose processes this happens; all by default.

    Raises:
        Exception: What pickle raises on a process, there; a RuntimeError that quotes it on the
            others.
        ValueError: If there is no such rank in the set.
    """
    members, root = members_of(process_set), process_of(root_rank, process_set)
    call = f"broadcast_object (root_rank={root_rank})"
    return _exchanged(call, value, members, (root,))[0]


def broadcast_state(tree: Any, *, root_rank: int = 0, process_set: ProcessSet | None = None) -> Any:
    """Returns the values of the process of rank `root_rank` on every process.

    Leaves keep the kinds that they have on each process: numbers stay Python numbers, NumPy arrays
    stay such, and JAX arrays, random keys among them, lie where they lay. So processes that have
    each initialised or restored a training state begin with the same one.

    Args:
        tree: Pytree of numbers, arrays and random keys, such as a Flax `TrainState`; of the same
            structure, shapes and dtypes on every process.
        root_rank: A rank of the job.
        process_set: The ranks among whose processes this happens; all by default.

    Raises:
        TypeError: If a leaf is none of these, or is sharded over several processes.
        ValueError: On every process, if structures, shapes or dtypes differ (the text names the
            leaf); if there is no such rank in the set.
    """
    root = process_of(root_rank, process_set)
    sent = broadcast(jax.tree.map(_jax.key_words, tree), root=root, process_set=process_set)
    return jax.tree.map(_like, tree, sent)


def _like(leaf: Any, value: np.ndarray) -> Any:
    if _jax.is_key(leaf):
        keys = _like(jax.random.key_data(leaf), value)
        return jax.random.wrap_key_data(keys, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.make_array_from_callback(
            value.shape, leaf.sharding, lambda index: value[index], dtype=leaf.dtype
        )
    if isinstance(leaf, np.ndarray):
        return value
    return value[()] if isinstance(leaf, np.generic) else type(leaf)(value.item())


def _exchanged(
    call: str, value: Any, members: tuple[int, ...], senders: tuple[int, ...]
) -> list[Any]:
    with exclusive(call):
        problem, data = None, b""
        try:
            if jax.process_index() in senders:
                data = _signed(call, value, is_alone=len(members) == 1)
        except Exception as error:  # Raised on every process, below.
            problem = error
        gathered = gather(
            call, np.frombuffer(data, np.uint8), members, problem=problem, is_ragged=True
        )
        ends = np.cumsum([shapes[0][0] for shapes in gathered.shapes])
        pieces = np.split(collected(gathered)[0], ends)
        problem, objects = None, []
        try:
            for sender in senders:
                data = pieces[members.index(sender)].tobytes()
                objects.append(_checked(call, data, sender, is_alone=len(members) == 1))
        except Exception as error:  # A class that is not there, on one process alone perhaps.
            problem = error
        failure = "" if problem is None else f"{type(problem).__name__}: {problem}"
        raise_first(problem, meet(call, failure, members=members), members)
        return objects


def _signed(call: str, value: Any, *, is_alone: bool) -> bytes:
    """Returns an object as bytes, by `_checked` the same one; alone, it leaves the process not."""
    if not (secret.get() or is_alone):
        _check_is_plain(call, value)
        return json.dumps(value).encode()
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return sign(_purpose(call, jax.process_index()), data) + data


def _checked(call: str, signed: bytes, sender: int, *, is_alone: bool) -> Any:
    if not (secret.get() or is_alone):
        return json.loads(signed)
    signature, data = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
    check_signature(_purpose(call, sender), data, signature)
    return pickle.loads(data)


def _purpose(call: str, sender: int) -> str:
    return f"The object of process {sender} in {call}"


def _check_is_plain(call: str, value: Any) -> None:
    """Raises a TypeError unless JSON gives the same object back."""
    if type(value) is dict and all(type(key) is str for key in value):
        value = list(value.values())
    if type(value) is list:
        for entry in value:
            _check_is_plain(call, entry)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(
            f"{call} passes on None, numbers, text, lists, and dicts whose keys are text, but here "
            f"{type(value).__name__}. {_NEEDED}"
        )
