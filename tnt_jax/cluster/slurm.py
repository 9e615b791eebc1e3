"""SLURM: detects the tasks of a job step, and expands SLURM's lists of nodes."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain, islice

from tnt_jax.cluster.job import GpuCounter, Job, choose_port, coordinator_address, own_devices

# SLURM's own limits are 65,533 nodes and as many dimensions of their names as there are letters.
_MOST_NODES, _MOST_RANGES = 2**16, 16
_PATTERN = r"(?:[^\[\]]|\[\d{1,18}(?:-\d{1,18})?(?:,\d{1,18}(?:-\d{1,18})?)*\])+"
_NEEDED = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")


def detect_slurm(environ: Mapping[str, str], count_gpus: GpuCounter) -> Job | None:
    """Returns the job of a task that `srun` started with others, otherwise None.

    A batch script counts as a single task, even if the job has many, and so does the shell that
    `salloc` opens in a step of its own.
    """
    if not all(environ.get(name) for name in _NEEDED):
        return None
    num_processes = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    if num_processes == 1:
        return None
    nodes = expand_nodes(environ["SLURM_STEP_NODELIST"])
    stated = environ.get("SLURM_STEP_NUM_NODES") or len(nodes)
    if int(stated) != len(nodes):
        raise ValueError(
            f"SLURM_STEP_NUM_NODES is {stated}, but SLURM_STEP_NODELIST "
            f"({environ['SLURM_STEP_NODELIST']:.80}) lists {len(nodes)} nodes. Start the script by "
            "srun, which sets both."
        )
    port = choose_port(int(environ["SLURM_JOB_ID"]) + int(environ.get("SLURM_STEP_ID") or 0))
    return Job(
        coordinator_address=coordinator_address(environ, nodes[0], port),
        num_processes=num_processes,
        process_id=int(environ["SLURM_PROCID"]),
        local_device_ids=own_devices(
            environ,
            local_rank=int(environ["SLURM_LOCALID"]),
            local_size=_tasks_on_this_node(environ, len(nodes), num_processes),
            gpus_on_node=_gpus_on_this_node(environ),
            count_gpus=count_gpus,
        ),
        source="SLURM",
    )


def _tasks_on_this_node(environ: Mapping[str, str], num_nodes: int, num_tasks: int) -> int:
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not counts:
        return -(-num_tasks // num_nodes)
    return expand_counts(counts)[int(environ.get("SLURM_NODEID") or 0)]


def _gpus_on_this_node(environ: Mapping[str, str]) -> int | None:
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(name):
            return len(environ[name].split(","))
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if count.isdigit() else None


def expand_counts(text: str) -> list[int]:
    """Returns the numbers in SLURM's notation for repeated counts.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d{1,5})\))?", part.strip())
        if found is None or len(counts) > _MOST_NODES:
            raise ValueError(
                f"SLURM states counts as 2(x3),1, of at most {_MOST_NODES} nodes, but here as "
                f"{text!r:.80}."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def expand_nodes(text: str) -> list[str]:
    """Returns the names in a SLURM node list.

    Example:
        >>> expand_nodes("gpu[01-03,7],login1")
        ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login1']
        >>> expand_nodes("rack[1-2]node[8-9]")
        ['rack1node8', 'rack1node9', 'rack2node8', 'rack2node9']
    """
    # A comma separates nodes outside the brackets only.
    patterns = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip())
    is_list = text.count("[") == text.count("]") and all(
        pattern.count("[") <= _MOST_RANGES and re.fullmatch(_PATTERN, pattern)
        for pattern in patterns
    )
    names = chain.from_iterable(_expand(pattern.strip()) for pattern in patterns if is_list)
    nodes = list(islice(names, _MOST_NODES + 1))
    if not 0 < len(nodes) <= _MOST_NODES:
        raise ValueError(
            f"SLURM lists nodes as node[01-03,7],other, {_MOST_NODES} at most, but here as "
            f"{text!r:.80}."
        )
    return nodes


def _expand(pattern: str) -> Iterator[str]:
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", pattern)
    if found is None:
        yield pattern
        return
    for number in _numbers(found[2]):
        for rest in _expand(found[3]):
            yield found[1] + number + rest


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        for number in range(int(first), int(last if dash else first) + 1):
            yield str(number).zfill(len(first))
