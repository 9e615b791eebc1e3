import pytest

from tnt_jax.cluster import devices


@pytest.mark.parametrize(
    ("physical", "value", "expected"),
    [
        (4, None, ["0", "1", "2", "3"]),
        (4, "2,3", ["2", "3"]),
        (4, " 1 , 0", ["1", "0"]),
        (4, "", []),
        (4, "-1", []),
        (4, "0,-1,1", ["0"]),  # CUDA hides everything from the first entry that names no device.
        (4, "0,4,1", ["0"]),
        (2, "GPU-8932f937-d72c,MIG-31b3", ["GPU-8932f937-d72c", "MIG-31b3"]),
        (0, "0,1", []),
        (0, None, []),
    ],
)
def test_visible_gpus(physical, value, expected):
    assert devices.visible_gpus(physical, value) == expected


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def make(text):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


def test_gpus_are_those_nvidia_smi_lists(nvidia_smi):
    nvidia_smi(
        "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'; echo '  MIG 1g.10gb Device 0: (UUID: MIG-1)'; "
        "echo 'GPU 1: NVIDIA H100'"
    )
    assert devices.count_gpus({}) == 2
    assert devices.list_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ["1"]


def test_driver_is_asked_where_nvidia_smi_fails(nvidia_smi, tmp_path, monkeypatch):
    nvidia_smi("exit 9")
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "_DRIVER_GPUS", tmp_path / "gpus")
    assert devices.count_gpus({}) == 1
    monkeypatch.setattr(devices, "_DRIVER_GPUS", tmp_path / "none")
    assert devices.count_gpus({}) == 0


def test_cpu_kind_depends_on_the_instructions_alone(tmp_path, monkeypatch):
    def kind(text):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(devices, "_CPU_INFO", tmp_path / "cpuinfo")
        return devices.cpu_kind()

    amd = kind("model name\t: A\nflags\t\t: fpu avx avx2\n")
    assert amd == kind("model name\t: B\nflags\t\t: avx2 fpu avx\n")
    assert amd != kind("model name\t: A\nflags\t\t: fpu avx\n")
    assert len(amd) == 8


def test_processors_of_a_core_are_listed_together(tmp_path, monkeypatch):
    # Two sockets of two cores with two processors each, numbered as Linux does.
    for number in range(8):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{number % 4 // 2}\n")
        (topology / "core_id").write_text(f"{number % 2}\n")
    monkeypatch.setattr(devices, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(8)))
    assert devices.list_processors() == [0, 4, 1, 5, 2, 6, 3, 7]
    monkeypatch.setattr(devices, "_PROCESSORS", tmp_path / "none")
    assert devices.list_processors() == list(range(8))
