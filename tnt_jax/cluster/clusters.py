"""Detects which job a process belongs to, whatever started it, and its position there."""

import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tnt_jax.cluster.devices import count_gpus
from tnt_jax.on_ray.worker import TrainWorker, broadcast, node_address, role, train_worker
from tnt_jax.settings import read_settings

# The end of the dynamic ports (RFC 6335), which Linux by default does not use for outgoing
# connections.
_FIRST_PORT = 61440
_NUM_PORTS = 4096
# More than any machine has: variables that ask for more are wrong, and would exhaust the memory.
MOST_PROCESSES = 2**20
RAY_TRAIN = "Ray Train"
"""`Job.source` of the workers of Ray Train."""


@dataclass(frozen=True)
class Job:
    """Settings with which a process joins its job."""

    coordinator_address: str  # `host:port` where process 0 listens.
    num_processes: int
    process_id: int  # Number of this process, `0 <= process_id < num_processes`.
    # Indices, among the visible devices, of those that this process owns; None for all.
    local_device_ids: tuple[int, ...] | None
    # Where this comes from, for messages: `RAY_TRAIN`, "TNT_*", "TF_CONFIG", "Open MPI", "SLURM" or
    # "Kubernetes".
    source: str

    def __post_init__(self) -> None:
        """Checks the numbers, which come from variables that anything may have set."""
        if not 0 <= self.process_id < self.num_processes <= MOST_PROCESSES:
            raise ValueError(
                f"{self.source} names process {self.process_id} of {self.num_processes}, but "
                "processes are numbered from 0 to below their number, which is "
                f"{MOST_PROCESSES} at most. Correct the variables of {self.source}."
            )


def choose_port(number: int) -> int:
    """Returns a port that all processes derive from a number they share, such as the job's id."""
    return _FIRST_PORT + number % _NUM_PORTS


def coordinator_address(environ: Mapping[str, str], host: str, port: int) -> str:
    """Returns the coordinator's address; JAX's own variables override those of the cluster."""
    given = environ.get("JAX_COORDINATOR_ADDRESS")
    if given and given.rpartition(":")[2].isdigit():
        return given
    return f"{given or host}:{environ.get('JAX_COORDINATOR_PORT') or port}"


def given_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns what `JAX_LOCAL_DEVICE_IDS` says; None if it is not set."""
    given = environ.get("JAX_LOCAL_DEVICE_IDS")
    return tuple(int(number) for number in given.split(",")) if given else None


def own_devices(
    environ: Mapping[str, str], *, local_rank: int, local_size: int, gpus_on_node: int | None
) -> tuple[int, ...] | None:
    """Returns which of the visible GPUs this process owns; None for all visible devices.

    JAX chooses the GPU whose index is the local rank. That fails if each task sees only its own
    GPU, as index 0 (jax#23452), and if a task has several. Here, a process that sees fewer GPUs
    than its node has owns all of them; processes that see all GPUs divide them evenly.

    `gpus_on_node` GPUs are those that the cluster gives the job on this node, None if unknown.
    `JAX_LOCAL_DEVICE_IDS` takes precedence; `JAX_PLATFORMS=cpu` means no GPU.
    """
    given = given_devices(environ)
    if given is not None:
        return given
    if local_size == 1 or environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return None
    visible = count_gpus(environ)
    if visible <= 1 or (gpus_on_node is not None and visible < gpus_on_node):
        return None
    first, end = (number * visible // local_size for number in (local_rank, local_rank + 1))
    # With more processes than GPUs neighbours share one (jax#29669).
    return tuple(range(first, max(end, first + 1)))


def is_started_by_script() -> bool:
    """Returns whether the script of the launcher's job has started this process, not the launcher.

    Programs between the two that run the script, such as `conda run`, are not the script.
    """
    if not {"TNT_JOB_ID", "TNT_TASK_PID"} & os.environ.keys():
        return False
    first = os.getsid(0), int(os.environ.get("TNT_TASK_PID", 0))
    pid = os.getpid()
    with suppress(OSError):  # The process is another user's, or the system has no /proc.
        own = _arguments("self")
        while pid > 1 and pid not in first:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            is_wrapper = _arguments(pid).endswith(b"\0" + own)
            if not is_wrapper and os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe"):
                return True
    return False


def _arguments(pid: int | str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[2]


# TensorFlow's own order: the chief, once called master, comes first.
_TF_KINDS = ("chief", "master", "worker")
_KUBERNETES_PORT = 55527  # JAX's own default on Kubernetes.


def detect_job(environ: Mapping[str, str]) -> Job | None:
    """Returns the job that this process belongs to, or None for a process that trains alone.

    A worker of Ray Train or a trial of Ray Tune belongs to the job that Ray says; the environment,
    which it inherits from whatever started Ray, does not count. Elsewhere the first of these that
    describes a job of several processes counts: `TNT_*` variables, `TF_CONFIG`, Open MPI (which may
    run inside SLURM), SLURM, Kubernetes. JAX's own `JAX_COORDINATOR_ADDRESS`,
    `JAX_COORDINATOR_PORT` and `JAX_LOCAL_DEVICE_IDS` override what the last three say. GPUs are
    counted only where several processes of SLURM or Open MPI share a host and may share its GPUs.

    A ValueError names variables that contradict each other, are incomplete, or describe something
    that cannot be trained on.
    """
    if role() is not None:
        return detect_ray_train()
    return (
        _detect_tnt(environ)
        or _detect_tf_config(environ)
        or _detect_open_mpi(environ)
        or detect_slurm(environ)
        or _detect_kubernetes(environ)
    )


def _detect_tnt(environ: Mapping[str, str]) -> Job | None:
    settings = read_settings(environ)
    if settings.coordinator_address is None:
        return None
    assert settings.num_processes is not None and settings.process_id is not None
    place = settings.coordinator_address, settings.num_processes, settings.process_id
    return Job(*place, given_devices(environ), "TNT_*")


def _detect_tf_config(environ: Mapping[str, str]) -> Job | None:
    text = environ.get("TF_CONFIG")
    if not text:
        return None
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
    except (json.JSONDecodeError, AttributeError, RecursionError) as error:
        raise ValueError(
            'TF_CONFIG must be JSON such as {"cluster": {"worker": ["host1:port", '
            '"host2:port"]}, "task": {"type": "worker", '
            f'"index": 0}}}}, but is {text!r:.200}.'
        ) from error
    if cluster.get("ps"):
        raise ValueError(
            "TF_CONFIG has parameter servers (ps), but the processes of such a job all hold the "
            "same weights and sum their gradients, as with TensorFlow's "
            "MultiWorkerMirroredStrategy. Leave the ps entries out and start workers only, or "
            "train with tnt_jax.ParameterServer on a Ray cluster, which needs no TF_CONFIG."
        )
    places = [(kind, i) for kind in _TF_KINDS for i in range(len(cluster.get(kind) or []))]
    if not places:
        return None
    place: Any = (task.get("type"), task.get("index"))
    if not isinstance(place[1], int) or place not in places:
        raise ValueError(
            f"TF_CONFIG's task must be one of the cluster's {', '.join(_TF_KINDS)} entries, for "
            f'instance {{"type": "worker", "index": 0}}, but is {json.dumps(task)}. An '
            "evaluator is not needed: evaluate() runs on all processes."
        )
    if len(places) == 1:
        return None
    addresses = [address for kind in _TF_KINDS for address in cluster.get(kind) or []]
    return Job(addresses[0], len(places), places.index(place), None, "TF_CONFIG")


def _detect_open_mpi(environ: Mapping[str, str]) -> Job | None:
    """Returns the job of a process that `mpirun` started, of version 4 (ORTE) or 5 (PRRTE)."""
    if not environ.get("OMPI_COMM_WORLD_SIZE") or not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    num_processes = int(environ["OMPI_COMM_WORLD_SIZE"])
    if num_processes == 1:
        return None
    local_size = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    # Of several hosts, that on which mpirun runs must have rank 0.
    host, number = _mpirun(environ)
    host = "127.0.0.1" if local_size == num_processes else host
    return Job(
        coordinator_address=coordinator_address(environ, host, choose_port(number)),
        num_processes=num_processes,
        process_id=int(environ["OMPI_COMM_WORLD_RANK"]),
        local_device_ids=own_devices(
            environ,
            local_rank=int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0),
            local_size=local_size,
            gpus_on_node=None,
        ),
        source="Open MPI",
    )


def _mpirun(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the host of mpirun and a number that is unique to this job on that host."""
    # Version 4, for instance: 550567936.0;tcp://10.0.0.2,10.1.0.2:48563;tcp6://[fd00::2]:33393
    # The number of the job family is the upper half of the job's number.
    found = re.match(
        r"(\d+)\.\d+;tcp(?:://([^,:]+)|6://\[([^,\]]+))", environ.get("OMPI_MCA_orte_hnp_uri", "")
    )
    if found:
        return found[2] or f"[{found[3]}]", int(found[1]) >> 16
    # Version 5, for instance: prterun-node1-4711@1, after the host and the process id of mpirun.
    found = re.match(r"[^-]+-(.+)-(\d+)@(\d+)", environ.get("PMIX_NAMESPACE", ""))
    if found:
        return found[1], int(found[2])
    raise ValueError(
        "Open MPI started this process, but neither OMPI_MCA_orte_hnp_uri nor PMIX_NAMESPACE says "
        "on which host mpirun runs. Set JAX_COORDINATOR_ADDRESS=host:port to a free port of the "
        "host of rank 0: mpirun -x JAX_COORDINATOR_ADDRESS=..."
    )


def _detect_kubernetes(environ: Mapping[str, str]) -> Job | None:
    """Returns the job of a pod of an indexed Job or JobSet, or of Kubeflow's JAX jobs."""
    # The manifest of an indexed job must set these two: pods need no permission for more.
    if environ.get("JAX_COORDINATOR_ADDRESS") and environ.get("JAX_NUM_PROCESSES"):
        address = coordinator_address(environ, "", _KUBERNETES_PORT)
        num_processes = environ["JAX_NUM_PROCESSES"]
        # Kubeflow Trainer sets the first, a plain indexed job has the number of the pod.
        index = environ.get("JAX_PROCESS_ID") or environ.get("JOB_COMPLETION_INDEX")
        name = "JAX_PROCESS_ID or JOB_COMPLETION_INDEX"
    elif (
        environ.get("KUBERNETES_SERVICE_HOST")
        and environ.get("COORDINATOR_ADDRESS")
        and environ.get("NUM_PROCESSES")
    ):
        # Kubeflow's JAXJob, the older of the two.
        port = environ.get("COORDINATOR_PORT") or _KUBERNETES_PORT
        address = f"{environ['COORDINATOR_ADDRESS']}:{port}"
        num_processes = environ["NUM_PROCESSES"]
        index, name = environ.get("PROCESS_ID"), "PROCESS_ID"
    else:
        return None
    if not index:
        raise ValueError(
            f"The environment names a coordinator and {num_processes} processes, but not the "
            f"number of this one: set {name}."
        )
    if int(num_processes) == 1:
        return None
    if not 0 <= int(index) < int(num_processes):
        raise ValueError(
            f"{name} ({index}) must be below the number of processes ({num_processes}). They are "
            "numbered from 0."
        )
    return Job(address, int(num_processes), int(index), None, "Kubernetes")


# SLURM's own limits are 65,533 nodes and as many dimensions of their names as there are letters.
_MOST_NODES, _MOST_RANGES = 2**16, 16
_PATTERN = r"(?:[^\[\]]|\[\d{1,18}(?:-\d{1,18})?(?:,\d{1,18}(?:-\d{1,18})?)*\])+"
_NEEDED = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")


def detect_slurm(environ: Mapping[str, str]) -> Job | None:
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
        ),
        source="SLURM",
    )


def _tasks_on_this_node(environ: Mapping[str, str], num_nodes: int, num_tasks: int) -> int:
    if counts := environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE"):
        return expand_counts(counts)[int(environ.get("SLURM_NODEID") or 0)]
    return -(-num_tasks // num_nodes)


def _gpus_on_this_node(environ: Mapping[str, str]) -> int | None:
    if numbers := environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS"):
        return len(numbers.split(","))
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
    for part in found[2].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand(found[3]):
                yield found[1] + str(number).zfill(len(first)) + rest


_SECRET_BYTES = 32


def detect_ray_train() -> Job | None:
    """Returns the job of a process that is one of several workers of Ray Train, otherwise None.

    All workers must call it, the first time: worker 0 tells the others where it will listen.
    """
    worker = train_worker()
    if worker is None or worker.size == 1:
        return None
    return Job(_agreed(worker)[0], worker.size, worker.rank, None, RAY_TRAIN)


def train_secret() -> bytes:
    """Returns what only the workers of this process's run know; all of them must call it."""
    # It travels within Ray, beside the address.
    worker = train_worker()
    assert worker is not None
    return _agreed(worker)[1]


# For the life of the process, which is a worker of one run only: a second call asks nobody.
@cache
def _agreed(worker: TrainWorker) -> tuple[str, bytes]:
    """Returns the address of the coordinator and the secret of the job; worker 0 chooses both."""
    if worker.rank:
        return broadcast(None)
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    host = node_address()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return broadcast((address, secrets.token_bytes(_SECRET_BYTES)))
