"""The plan as data: hosts, devices and options in, processes out."""

import dataclasses
import os

import pytest

from tnt_jax.cluster.clusters import Job
from tnt_jax.launch.planning.facts import Facts
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.planning.plan import (
    PLUGIN_PATH,
    Devices,
    Host,
    Launch,
    carried_environment,
    choose_devices,
    plan_processes,
    task_environment,
)

FACTS = Facts(
    hostname="node1",
    machine="m1",
    own_addresses=("10.0.0.1",),
    ssh_address=None,
    python="3.11.7",
    versions={"tnt-jax": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2"},
    cpu_kind="0a1b2c3d",
    processors=tuple(range(8)),
    gpus=(),
    has_cuda_jax=True,
    numa_nodes=(0, 1),
    numactl="/usr/bin/numactl",
    cache_dir="/home/ada/.cache",
    no_cache_because="",
    package_root=None,
    missing=(),
)
OPTIONS = Options(script="train.py", script_args=("--epochs", "3"), interpreter=("python",))
LAUNCH = Launch("train-1", "node1:4711", "/work", {"PATH": "/bin"}, 12.5)


def host(name="node1", *, gpus=0, slots=None, is_remote=False, **facts):
    gpus = tuple(str(number) for number in range(gpus))
    return Host(
        name,
        dataclasses.replace(FACTS, hostname=name, machine=name, gpus=gpus, **facts),
        slots,
        is_remote,
    )


def options(**changes):
    return dataclasses.replace(OPTIONS, **changes)


def plan(hosts, options, **launch):
    return plan_processes(
        hosts, choose_devices(hosts, options), options, dataclasses.replace(LAUNCH, **launch)
    )


def test_cpu_process_in_full():
    (process,) = plan([host()], options(use_gpus=False), coordinator_address="127.0.0.1:4711")
    assert dataclasses.asdict(process) == {
        "rank": 0,
        "local_rank": 0,
        "host": "node1",
        "command": ("python", "train.py", "--epochs", "3"),
        "cwd": "/work",
        "environment": {
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "TF_CPP_MIN_LOG_LEVEL": "1",
            "OMP_NUM_THREADS": "8",
            "TF_NUM_INTRAOP_THREADS": "8",
            "JAX_COMPILATION_CACHE_DIR": "/home/ada/.cache/tnt_jax/compilation-0a1b2c3d",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "PJRT_NPROC": "8",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "TNT_LAUNCHED_AT": "12.500",
            "TNT_JOB_ID": "train-1",
            "TNT_RESTART_COUNT": "0",
            "TNT_COORDINATOR_ADDRESS": "127.0.0.1:4711",
            "TNT_NUM_PROCESSES": "1",
            "TNT_PROCESS_ID": "0",
            "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:4711",
        },
        "exports": (),
        "shown": ("stdout", "stderr"),
        "log_file": None,
        "terminals": (),
        "columns": 80,
        "processors": (),
        "is_elastic": False,
    }


def test_gpu_processes_on_two_hosts_in_full():
    hosts = [host(gpus=2), host("node2", gpus=2, is_remote=True)]
    processes = plan(hosts, options(log_dir="logs", log_on_all_devices=True))
    assert [(p.rank, p.host, p.local_rank, p.log_file) for p in processes] == [
        (0, "node1", 0, "/work/logs/rank0.log"),
        (1, "node1", 1, "/work/logs/rank1.log"),
        (2, "node2", 0, "/work/logs/rank2.log"),
        (3, "node2", 1, "/work/logs/rank3.log"),
    ]
    assert processes[3].shown == ("stderr",)
    assert processes[3].environment == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "OMP_NUM_THREADS": "4",
        "TF_NUM_INTRAOP_THREADS": "4",
        "JAX_COMPILATION_CACHE_DIR": "/home/ada/.cache/tnt_jax/compilation-0a1b2c3d",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_LOCAL_DEVICE_IDS": "1",
        "TNT_LAUNCHED_AT": "12.500",
        "TNT_JOB_ID": "train-1",
        "TNT_RESTART_COUNT": "0",
        "TNT_COORDINATOR_ADDRESS": "node1:4711",
        "TNT_NUM_PROCESSES": "4",
        "TNT_PROCESS_ID": "3",
        "TNT_LOG_ON_ALL_DEVICES": "1",
        "PYTHONPATH": PLUGIN_PATH,
    }


# Tarantella's rules for the number of devices.
@pytest.mark.parametrize(
    ("gpus", "asked", "use_gpus", "expected", "warning"),
    [
        (4, None, True, Devices("gpu", (4,)), None),
        (4, 2, True, Devices("gpu", (2,)), None),
        (4, 4, True, Devices("gpu", (4,)), None),
        (0, None, True, Devices("cpu", (1,)), "Cannot find any GPU; using 1 rank on CPUs instead."),
        (
            2,
            4,
            True,
            Devices("cpu", (4,)),
            "Cannot find 4 available GPUs per node as requested; using 4 ranks on CPUs instead.",
        ),
        (4, None, False, Devices("cpu", (1,)), None),
        (4, 3, False, Devices("cpu", (3,)), None),
    ],
)
def test_devices_are_chosen(gpus, asked, use_gpus, expected, warning):
    devices = choose_devices([host(gpus=gpus)], options(devices_per_node=asked, use_gpus=use_gpus))
    assert (devices.kind, devices.per_host) == (expected.kind, expected.per_host)
    assert devices.warnings == ((warning,) if warning else ())


@pytest.mark.parametrize("asked", [None, 2])
def test_nothing_is_said_of_gpus_where_neither_the_host_nor_its_jax_knows_any(asked):
    devices = choose_devices([host(has_cuda_jax=False)], options(devices_per_node=asked))
    assert devices == Devices("cpu", (asked or 1,), ())


def test_gpus_that_jax_cannot_use_are_no_gpus():
    devices = choose_devices([host(gpus=2, has_cuda_jax=False)], OPTIONS)
    assert (devices.kind, devices.per_host) == ("cpu", (1,))
    assert "install jax[cuda13]" in devices.warnings[0]


def test_slots_give_each_host_its_own_number():
    hosts = [host(slots=3), host("node2", slots=1)]
    assert choose_devices(hosts, options(use_gpus=False)).per_host == (3, 1)


@pytest.mark.parametrize(
    ("hosts", "changes", "message"),
    [
        ([host(slots=2)], {"devices_per_node": 4}, r"slots=2.*asks for 4.*Leave one"),
        ([host(slots=99999999999)], {}, r"at most, but 99999999999 are asked for"),
        ([host(gpus=4), host("node2", gpus=2)], {}, "node1 has 4, node2 has 2"),
        (
            [host(gpus=4), host("node2")],
            {"devices_per_node": 2},
            "node1 has 4, node2 has 0.*--no-gpu",
        ),
    ],
)
def test_hosts_that_do_not_fit_are_refused(hosts, changes, message):
    with pytest.raises(ValueError, match=message):
        choose_devices(hosts, options(**changes))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpu", [{"JAX_LOCAL_DEVICE_IDS": "0,1"}, {"JAX_LOCAL_DEVICE_IDS": "2,3"}]),
        ("cpu", [{"JAX_NUM_CPU_DEVICES": "2", "PJRT_NPROC": "4"}] * 2),
    ],
)
def test_fewer_processes_than_devices_share_them(kind, expected):
    chosen = options(use_gpus=kind == "gpu", devices_per_node=4, processes_per_node=2)
    processes = plan([host(gpus=4)], chosen)
    assert [{name: p.environment[name] for name in expected[0]} for p in processes] == expected


def test_processes_must_divide_devices():
    with pytest.raises(
        ValueError, match=r"--processes-per-node \(3\) must divide .* on node1 \(4\)"
    ):
        plan([host()], options(use_gpus=False, devices_per_node=4, processes_per_node=3))


def test_lone_process_is_restricted_to_its_gpus_by_cuda():
    facts = dataclasses.replace(FACTS, gpus=("5", "GPU-7"))
    (process,) = plan([Host("node1", facts)], options(devices_per_node=1))
    assert process.environment["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    ("num_cores", "num_processes", "expected"),
    [(8, 2, ("4", "4")), (8, 3, ("2", "2")), (2, 4, ("1", "1")), (1, 1, ("1", "1"))],
)
def test_cores_are_divided_fairly(num_cores, num_processes, expected):
    processes = plan(
        [host(processors=tuple(range(num_cores)))],
        options(use_gpus=False, devices_per_node=num_processes),
    )
    assert {(p.environment["OMP_NUM_THREADS"], p.environment["PJRT_NPROC"]) for p in processes} == {
        expected
    }


@pytest.mark.parametrize(
    ("num_processes", "expected"),
    [(1, [()]), (2, [(0, 4, 1, 5), (2, 6, 3, 7)]), (3, [(), (), ()]), (16, [()] * 16)],
)
def test_processes_get_processors_of_their_own_if_they_share_them_evenly(num_processes, expected):
    cores = host(processors=(0, 4, 1, 5, 2, 6, 3, 7))
    processes = plan([cores], options(use_gpus=False, devices_per_node=num_processes))
    assert [process.processors for process in processes] == expected


def test_what_the_user_set_is_left_alone():
    environ = {
        "OMP_NUM_THREADS": "3",
        "JAX_COMPILATION_CACHE_DIR": "/cache",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "2",
        "TNT_LOG_LEVEL": "INFO",
        "PJRT_NPROC": "9",
    }
    environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=0"
    (process,) = plan([host()], options(use_gpus=False), environ=environ)
    assert not environ.keys() & process.environment.keys()
    assert (
        plan([host(is_remote=True)], options(use_gpus=False), environ=environ)[
            0
        ].environment.items()
        >= environ.items()
    )


def test_library_options_become_variables():
    chosen = options(
        use_gpus=False,
        log_level="DEBUG",
        output_on_all_devices=True,
        fusion_threshold_kb=0,
        compilation_cache=False,
        checkpoint_dir="runs/a",
        checkpoint_every="500",
    )
    environment = plan([host()], chosen)[0].environment
    assert (
        environment.items()
        >= {
            "TNT_CHECKPOINT_DIR": os.path.abspath("runs/a"),
            "TNT_CHECKPOINT_EVERY": "500",
            "TNT_LOG_LEVEL": "DEBUG",
            "TNT_OUTPUT_ON_ALL_DEVICES": "1",
            "TNT_FUSION_THRESHOLD": "0",
        }.items()
    )
    assert not [name for name in environment if "CACHE" in name]


def test_coordinator_is_exempt_from_proxies():
    environ = {"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "intranet"}
    environment = plan([host()], options(use_gpus=False), environ=environ)[0].environment
    assert environment["no_proxy"] == environment["NO_PROXY"] == "intranet,node1"


def test_uninstalled_package_is_put_on_the_path():
    environment = plan(
        [host(package_root="/src")], options(use_gpus=False), environ={"PYTHONPATH": "/mine"}
    )[0].environment
    assert environment["PYTHONPATH"] == "/src:/mine"


@pytest.mark.parametrize(("strict", "memory"), [(False, "--preferred"), (True, "--membind")])
def test_processes_are_pinned_to_sockets(strict, memory):
    chosen = options(
        use_gpus=False, devices_per_node=2, pin_to_socket=True, pin_memory_to_socket=strict
    )
    assert [p.command[:3] for p in plan([host(numa_nodes=(0, 2))], chosen)] == [
        ("/usr/bin/numactl", "--cpunodebind=0", f"{memory}=0"),
        ("/usr/bin/numactl", "--cpunodebind=2", f"{memory}=2"),
    ]


@pytest.mark.parametrize(
    ("facts", "error", "message"),
    [
        ({"numa_nodes": ()}, ValueError, "node1 has 0 for 2 processes"),
        ({"numa_nodes": (0,)}, ValueError, "node1 has 1 for 2 processes"),
        ({"numactl": None}, FileNotFoundError, "needs the program numactl on node1"),
    ],
)
def test_impossible_pinning_is_refused(facts, error, message):
    with pytest.raises(error, match=message):
        plan([host(**facts)], options(use_gpus=False, devices_per_node=2, pin_to_socket=True))


def test_empty_interpreter_runs_the_script_itself():
    assert plan([host()], options(interpreter=()))[0].command == ("/work/train.py", "--epochs", "3")


def test_trials_start_the_script_through_their_entry():
    command = plan([host()], options(interpreter=("python",), tune_steps=5))[0].command
    entry = ("-m", "tnt_jax.launch.entry")
    assert command == ("python", *entry, "train.py", "--epochs", "3")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("stdout", "stderr"), ()]),
        ({"log_on_all_devices": True}, [("stdout",), ()]),
        ({"output_on_all_devices": True}, [(), ()]),
    ],
)
def test_only_what_is_shown_alone_is_a_terminal(changes, expected):
    chosen = options(use_gpus=False, devices_per_node=2, **changes)
    assert [p.terminals for p in plan([host()], chosen, terminals=("stdout", "stderr"))] == expected


def test_part_of_a_clusters_job_numbers_its_processes_after_those_of_the_parts_before():
    processes = plan([host()], options(use_gpus=False, devices_per_node=2), num_parts=3, part=1)
    assert [(p.rank, p.local_rank, p.environment["TNT_NUM_PROCESSES"]) for p in processes] == [
        (2, 0, "6"),
        (3, 1, "6"),
    ]
    assert processes[0].shown == ()
    assert "JAX_COORDINATOR_BIND_ADDRESS" not in processes[0].environment


def test_only_variables_that_concern_training_are_carried_to_other_hosts():
    environ = {
        "PATH": "p",
        "HOME": "h",
        "TNT_A": "1",
        "XLA_FLAGS": "2",
        "JAX_A": "3",
        "TF_A": "4",
        "NCCL_A": "5",
        "SSH_TTY": "t",
    }
    assert carried_environment(environ) == {
        name: value for name, value in environ.items() if name not in ("HOME", "SSH_TTY")
    }


def test_a_script_on_ray_starts_with_the_environment_of_the_launcher():
    of_a_host = {"HOME": "h", "SSH_TTY": "t", "CUDA_VISIBLE_DEVICES": "3", "RAY_ADDRESS": "a:1"}
    environ = {"PATH": "p", "MYVAR": "hello", "EMPTY": "", "XLA_FLAGS": "2", **of_a_host}
    hosts = [host(is_remote=True)]
    (process,) = plan(hosts, options(use_gpus=False, ray_address="auto"), environ=environ)
    assert {name: process.environment.get(name) for name in environ} == {
        **environ, **dict.fromkeys(of_a_host)
    }  # fmt: skip
    (process,) = plan(hosts, options(use_gpus=False), environ=environ)
    assert "MYVAR" not in process.environment


def test_task_of_a_cluster_gets_its_place_and_devices():
    environment = task_environment(
        Job("n1:1", 4, 3, (2, 3), "SLURM"), facts=FACTS, options=OPTIONS, environ={}
    )
    assert environment == {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "OMP_NUM_THREADS": "8",
        "TF_NUM_INTRAOP_THREADS": "8",
        "JAX_COMPILATION_CACHE_DIR": "/home/ada/.cache/tnt_jax/compilation-0a1b2c3d",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_LOCAL_DEVICE_IDS": "2,3",
        "TNT_COORDINATOR_ADDRESS": "n1:1",
        "TNT_NUM_PROCESSES": "4",
        "TNT_PROCESS_ID": "3",
        "PYTHONPATH": PLUGIN_PATH,
    }
