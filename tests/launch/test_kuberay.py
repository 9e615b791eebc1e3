"""The example for KubeRay, against the fields of its API and the launcher's own options."""

import shlex
from pathlib import Path

import pytest

from tnt_jax.launch.planning.options import parse_options

yaml = pytest.importorskip("yaml", reason="needs the extra examples")
REPOSITORY = Path(__file__).parents[2]
# From ray-operator/apis/ray/v1 of KubeRay 1.4: what the example may say, and what it must.
FIELDS = {
    "job": {
        "entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec",
        "backoffLimit", "runtimeEnvYAML", "submissionMode", "activeDeadlineSeconds",
    },
    "cluster": {"headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling"},
    "head": {"rayStartParams", "template"},
    "group": {
        "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template",
    },
}  # fmt: skip


@pytest.fixture
def job():
    return yaml.safe_load((REPOSITORY / "examples/cluster/raycluster.yaml").read_text())


def test_the_example_has_the_fields_of_a_ray_job(job):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert set(job["spec"]) <= FIELDS["job"]
    assert set(cluster) <= FIELDS["cluster"]
    assert set(cluster["headGroupSpec"]) == FIELDS["head"]
    for group in cluster["workerGroupSpecs"]:
        assert set(group) == FIELDS["group"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for part in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in part["rayStartParams"].values())
        spec = part["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_its_command_asks_for_the_gpus_of_its_pods(job):
    program, *words = shlex.split(job["spec"]["entrypoint"])
    options = parse_options(words, version="")
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = sum(
        group["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
        for group in groups
        for container in group["template"]["spec"]["containers"]
    )
    assert program == "tnt-jax"
    assert options.ray_devices == gpus
    assert options.use_gpus
    assert options.min_devices < gpus
    assert (REPOSITORY / options.script).exists()
