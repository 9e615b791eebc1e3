"""Every way a process can learn its place in a job, on environments as the cluster managers set
them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tnt_jax.cluster.clusters import Job, detect_job, expand_counts, expand_nodes
from tnt_jax.launch.command import main

# Two nodes, two tasks each, srun of SLURM 22.05; shortened to what concerns tasks and devices.
SLURM = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_STEP_GPUS": "0,1",
}
# mpirun of Open MPI 4.1.4 over two hosts.
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "550567936.0;tcp://10.0.0.2,10.1.0.2:48563;tcp6://[fd00::2]:33393",
}
OPEN_MPI_5 = {
    **{name: value for name, value in OPEN_MPI_4.items() if "COMM" in name},
    "PMIX_NAMESPACE": "prterun-login-node1-4711@1",
    "PMIX_SERVER_URI41": "prterun-login-node1-4711@0.0;tcp4://10.0.0.3:44441",
}


# Of a process that was started by hand.
TNT = {"TNT_COORDINATOR_ADDRESS": "a:1", "TNT_NUM_PROCESSES": "3", "TNT_PROCESS_ID": "1"}


def detect(environ, gpus=0):
    with patch("tnt_jax.cluster.clusters.count_gpus", lambda environ: gpus):
        return detect_job(environ)


def test_no_variables_means_no_job():
    assert detect({"PATH": "/bin", "HOME": "/"}) is None


def test_tnt_variables_come_first():
    environ = {
        "TNT_COORDINATOR_ADDRESS": "a:1",
        "TNT_NUM_PROCESSES": "2",
        "TNT_PROCESS_ID": "1",
        **SLURM,
    }
    assert detect(environ) == Job("a:1", 2, 1, None, "TNT_*")
    assert detect({**environ, "JAX_LOCAL_DEVICE_IDS": "2,3"}).local_device_ids == (2, 3)


def test_incomplete_tnt_variables_are_refused():
    with pytest.raises(ValueError, match="TNT_PROCESS_ID is missing"):
        detect({"TNT_COORDINATOR_ADDRESS": "a:1", "TNT_NUM_PROCESSES": "2"})


# SLURM.


def test_slurm_task_finds_its_place():
    job = detect(SLURM)
    assert job == Job(f"gpu07:{61440 + 1731344 % 4096}", 4, 3, None, "SLURM")


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        ({}, 2, (1,)),  # All GPUs visible, one for each task.
        (
            {"SLURM_GPUS_PER_TASK": "1"},
            1,
            None,
        ),  # --gpus-per-task=1: each task sees its own GPU, as number 0 (jax#23452).
        ({"SLURM_STEP_GPUS": "2"}, 1, None),  # The step itself is limited.
        (
            {"SLURM_STEP_GPUS": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"},
            4,
            (2, 3),
        ),  # Two visible GPUs for each task.
        (
            {"SLURM_STEP_GPUS": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"},
            2,
            None,
        ),  # --gpus-per-task=2, each sees its own two.
        (
            {
                "SLURM_STEP_GPUS": "0,1,2,3",
                "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
                "SLURM_LOCALID": "5",
            },
            4,
            (2,),
        ),  # jax#29669
        ({"SLURM_STEP_GPUS": "", "SLURM_GPUS_ON_NODE": ""}, 0, None),  # CPUs only.
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"},
            4,
            None,
        ),  # A process for a host.
        ({"JAX_LOCAL_DEVICE_IDS": "0"}, 2, (0,)),
        ({"JAX_PLATFORMS": "cpu"}, 2, None),
    ],
)
def test_slurm_task_gets_its_own_gpus(changes, gpus, expected):
    assert detect({**SLURM, **changes}, gpus).local_device_ids == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NODELIST": ""},  # A batch script.
        {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_ID": "4294967290",
        },  # The shell of salloc, which counts the job's tasks.
    ],
)
def test_slurm_batch_script_and_interactive_shell_are_alone(changes):
    assert detect({**SLURM, **changes}) is None


def test_two_steps_of_a_slurm_job_do_not_share_a_port():
    assert (
        detect(SLURM).coordinator_address
        != detect({**SLURM, "SLURM_STEP_ID": "1"}).coordinator_address
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99"}, "10.0.0.1:99"),
        ({"JAX_COORDINATOR_ADDRESS": "ib07", "JAX_COORDINATOR_PORT": "98"}, "ib07:98"),
        ({"JAX_COORDINATOR_PORT": "97"}, "gpu07:97"),
    ],
)
def test_jax_variables_overrule_the_address(changes, expected):
    assert detect({**SLURM, **changes}).coordinator_address == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("n1,n3", ["n1", "n3"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-010,020],login-1", ["n008", "n009", "n010", "n020", "login-1"]),
        ("a[1-2]-ib,b[1,3]", ["a1-ib", "a2-ib", "b1", "b3"]),
        ("r[1-2]n[8-9]", ["r1n8", "r1n9", "r2n8", "r2n9"]),
    ],
)
def test_expand_nodes(text, expected):
    assert expand_nodes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "n[1-2", "n[]", "n[3-1]", "n[a-b]", "n[0-99999999999]", "n[0-99999],m[0-99999999999]",
        "r[0-99999]n[0-99999]", f"n[0-{'9' * 5000}]", "n" + "[1]" * 30_000, "n[1-65537]",
    ],
)  # fmt: skip
def test_malformed_and_endless_node_lists_are_refused(text):
    with pytest.raises(ValueError, match=r"SLURM lists nodes as .* 65536 at most, but here as"):
        expand_nodes(text)


def test_as_many_nodes_as_slurm_allows_are_listed():
    assert expand_nodes("n[1-65536]")[-1] == "n65536"


def test_a_node_list_that_contradicts_the_number_of_nodes_is_refused():
    assert detect({**SLURM, "SLURM_STEP_NUM_NODES": "2"}) == detect(SLURM)
    with pytest.raises(ValueError, match=r"NUM_NODES is 3, but .*\(gpu\[07-08\]\) lists 2 nodes"):
        detect({**SLURM, "SLURM_STEP_NUM_NODES": "3"})


def test_malformed_and_endless_counts_are_refused():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    for text in ("2x3", "2(x99999999999)", "2(x99999)," * 2000 + "1"):
        with pytest.raises(ValueError, match="SLURM states counts as"):
            expand_counts(text)


@pytest.mark.parametrize(
    "environ",
    [
        {**SLURM, "SLURM_STEP_NUM_TASKS": "99999999999"},
        {**SLURM, "SLURM_PROCID": "4"},
        {**OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE": "99999999999"},
        {**OPEN_MPI_4, "OMPI_COMM_WORLD_RANK": "-1"},
        {
            "TNT_COORDINATOR_ADDRESS": "a:1",
            "TNT_NUM_PROCESSES": "99999999999",
            "TNT_PROCESS_ID": "1",
        },
        {
            "JAX_COORDINATOR_ADDRESS": "a:1",
            "JAX_NUM_PROCESSES": "99999999999",
            "JAX_PROCESS_ID": "1",
        },
    ],
)
def test_numbers_of_processes_out_of_range_are_refused(environ):
    with pytest.raises(ValueError, match="processes are numbered from 0 to below their number"):
        detect(environ)


# Open MPI.


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        (OPEN_MPI_4, "10.0.0.2"),
        (
            {**OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fd00::2,fd00::3]:33393"},
            "[fd00::2]",
        ),
        (OPEN_MPI_5, "login-node1"),
    ],
)
def test_open_mpi_process_finds_its_place(environ, host):
    job = detect(environ)
    assert (job.num_processes, job.process_id, job.local_device_ids, job.source) == (
        4,
        2,
        None,
        "Open MPI",
    )
    assert job.coordinator_address.rpartition(":")[0] == host
    assert 61440 <= int(job.coordinator_address.rpartition(":")[2]) < 65536


def test_open_mpi_wins_over_the_slurm_job_it_runs_in():
    assert detect({**SLURM, **OPEN_MPI_4}).source == "Open MPI"


def test_open_mpi_processes_of_one_host_meet_on_loopback():
    assert detect({**OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).coordinator_address.startswith(
        "127.0.0.1:"
    )


def test_open_mpi_process_gets_its_own_gpus():
    assert detect({**OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, gpus=4).local_device_ids == (
        2,
        3,
    )


def test_open_mpi_without_the_host_of_mpirun_says_what_to_do():
    with pytest.raises(ValueError, match="Set JAX_COORDINATOR_ADDRESS"):
        detect({name: value for name, value in OPEN_MPI_5.items() if "PMIX" not in name})


# Kubernetes.

INDEXED_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "train-0.train",
    "JAX_NUM_PROCESSES": "2",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (INDEXED_JOB, Job("train-0.train:55527", 2, 1, None, "Kubernetes")),
        ({**INDEXED_JOB, "JAX_COORDINATOR_PORT": "99"}, Job("train-0.train:99", 2, 1, None, "Kubernetes")),
        (
            {"JAX_COORDINATOR_ADDRESS": "t:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"},
            Job("t:1", 3, 2, None, "Kubernetes"),
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "h", "COORDINATOR_ADDRESS": "t", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "2",
             "PROCESS_ID": "0"},
            Job("t:6666", 2, 0, None, "Kubernetes"),
        ),
        ({**INDEXED_JOB, "JAX_NUM_PROCESSES": "1"}, None),
        # Independent pods.
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1"}, None),
    ],
)  # fmt: skip
def test_pod_finds_its_place(environ, expected):
    assert detect(environ) == expected


def test_pod_without_a_number_is_refused():
    with pytest.raises(ValueError, match="set JAX_PROCESS_ID or JOB_COMPLETION_INDEX"):
        detect(
            {name: value for name, value in INDEXED_JOB.items() if name != "JOB_COMPLETION_INDEX"}
        )


def test_pod_number_out_of_range_is_refused():
    with pytest.raises(ValueError, match="must be below the number of processes"):
        detect({**INDEXED_JOB, "JOB_COMPLETION_INDEX": "2"})


# TF_CONFIG.


def tf_config(cluster, kind, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "expected"),
    [
        ({"worker": ["a:1", "b:2"]}, "worker", 1, Job("a:1", 2, 1, None, "TF_CONFIG")),
        (
            {"worker": ["a:1", "b:2"], "chief": ["c:3"]},
            "chief",
            0,
            Job("c:3", 3, 0, None, "TF_CONFIG"),
        ),
        (
            {"worker": ["a:1", "b:2"], "chief": ["c:3"]},
            "worker",
            1,
            Job("c:3", 3, 2, None, "TF_CONFIG"),
        ),
        ({"worker": ["a:1", "b:2"], "ps": []}, "worker", 0, Job("a:1", 2, 0, None, "TF_CONFIG")),
        ({"worker": ["a:1"]}, "worker", 0, None),
        ({}, "worker", 0, None),
    ],
)
def test_tf_config_gives_the_place(cluster, kind, index, expected):
    assert detect(tf_config(cluster, kind, index)) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            tf_config({"worker": ["a:1"], "ps": ["p:1"]}, "worker", 0),
            "sum their gradients.*workers only, or train with tnt_jax.ParameterServer",
        ),
        (tf_config({"worker": ["a:1", "b:1"]}, "evaluator", 0), "An evaluator is not needed"),
        (tf_config({"worker": ["a:1", "b:1"]}, "worker", 2), "must be one of the cluster's"),
        ({"TF_CONFIG": "{worker"}, "must be JSON such as"),
    ],
)
def test_unusable_tf_config_is_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        detect(environ)


@pytest.fixture
def mpirun():
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun (Debian: apt-get install openmpi-bin)")

    def run(*command):
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **as_root}
        words = ["mpirun", "--oversubscribe", "-np", "3", *map(str, command)]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
        return done.returncode, sorted(done.stdout.splitlines()), done.stderr

    return run


@pytest.mark.multiprocess
def test_processes_of_a_real_mpirun_agree(mpirun):
    # One write for a line: mpirun may put what another process says between two.
    program = "import os; from tnt_jax.cluster.clusters import detect_job; os.write(1, f'{detect_job(os.environ)}\\n'.encode())"
    code, jobs, err = mpirun(sys.executable, "-c", program)
    assert code == 0, err
    assert len({line.partition("process_id=")[0] for line in jobs}) == 1
    assert [f"process_id={rank}," in line for rank, line in enumerate(jobs)] == [True] * 3


PLACE = """
import os, sys
e = os.environ
os.write(1, f"{e['TNT_PROCESS_ID']} {e['TNT_NUM_PROCESSES']} {sys.argv[1:]} {e['A']}\\n".encode())
"""


@pytest.mark.multiprocess
def test_mpirun_of_the_launcher_is_one_process_for_each_task(mpirun, tmp_path):
    (tmp_path / "script.py").write_text(PLACE)
    code, lines, err = mpirun(
        sys.executable,
        "-m",
        "tnt_jax.launch",
        "--no-gpu",
        "-x",
        "A=$TNT_PROCESS_ID",
        "--",
        tmp_path / "script.py",
        "x y",
    )
    assert (code, lines) == (0, [f"{rank} 3 ['x y'] {rank}" for rank in range(3)]), err


@pytest.mark.multiprocess
def test_mpirun_of_the_launcher_with_a_number_is_so_many_processes_for_each_task(mpirun, tmp_path):
    (tmp_path / "script.py").write_text(PLACE)
    arguments = [
        "--no-gpu",
        "--devices-per-node",
        2,
        "--output-on-all-devices",
        "-x",
        "A=1",
        "--",
        tmp_path / "script.py",
    ]
    code, lines, err = mpirun(sys.executable, "-m", "tnt_jax.launch", *arguments)
    assert (code, lines) == (0, [f"[rank {rank}] {rank} 6 [] 1" for rank in range(6)]), err


def test_a_dry_run_of_a_task_shows_its_variables_and_starts_nothing(monkeypatch, capsys, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("It was started."))
    for name, value in TNT.items():
        monkeypatch.setenv(name, value)
    assert main(["--no-gpu", "--dry-run", "-x", "TNT_JOB_SECRET=hidden", "--", str(script)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("process 1 of 3 on ")
    assert "  TNT_NUM_PROCESSES=3\n" in shown
    assert shown.endswith(f" {script}\n")
    assert "hidden" not in shown


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "4711"],
        ["--port", "4711", "--devices-per-node", "2"],
        ["--processes-per-node", "2"],
        ["--pin-to-socket"],
        ["--log-dir", "logs"],
        ["--grace-period", "60"],
    ],
)
def test_what_a_cluster_decides_for_its_tasks_is_refused(words, monkeypatch, capsys):
    for name, value in TNT.items():
        monkeypatch.setenv(name, value)
    assert main(["--no-gpu", "--dry-run", *words, "--", "train.py"]) == 2
    assert f"{words[0]} cannot be used here: TNT_* decides it" in capsys.readouterr().err
