"""`join`: a process that has no more data lets the others go on."""

import json

from tnt_jax.distributed.host.exchange import agree_on_exchange, are_small, exclusive, gather_chunks
from tnt_jax.distributed.joining.process_sets import ProcessSet, members_of
from tnt_jax.distributed.liveness.rendezvous import meet


def join(*, process_set: ProcessSet | None = None) -> int:
    """Waits until every process has called `join`.

    Meanwhile this process takes part, without values, in the others' `all_reduce` and
    `all_gather_rows`. It is for loops that exchange host values batch by batch, where processes
    have different numbers of batches. A jitted step runs on all ranks or on none; there
    `tnt.distribute` hands out uneven data, with masks.

    Args:
        process_set: The ranks among whose processes this happens; all by default.

    Returns:
        The number of the process that joined last; of several the highest.

    Raises:
        RuntimeError: On every process, if one that has not joined makes another call that needs all
            processes.
    """
    members = members_of(process_set)
    num_calls = 0
    with exclusive("join"):
        while True:
            texts = meet("join", json.dumps({"joined": num_calls}), members=members, role="joins")
            entries = [json.loads(text) for text in texts]
            if all("joined" in entry for entry in entries):
                fewest = min(entry["joined"] for entry in entries)
                return max(
                    member
                    for member, entry in zip(members, entries, strict=True)
                    if entry["joined"] == fewest
                )
            present = agree_on_exchange("join", entries, members)
            if not are_small(entries):
                total = max(entries[position]["total"] for position in present)
                for _ in gather_chunks([], members, total):
                    pass  # Each chunk is a collective that needs this process.
            num_calls += 1
