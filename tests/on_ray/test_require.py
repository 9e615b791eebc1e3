import subprocess
import sys

import pytest

from tnt_jax.on_ray.worker import import_ray


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ModuleNotFoundError, match=r'RayData needs Ray.*pip install "tnt-jax\[ray\]"'
    ):
        import_ray("RayData")


def test_an_old_ray_is_refused_with_both_versions(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "__version__", "2.9.3")
    with pytest.raises(ImportError, match=r"needs Ray 2\.60 or later, but 2\.9\.3 is installed"):
        import_ray("RayData")


def test_every_file_of_the_room_can_be_imported_without_ray():
    code = """
import importlib, pkgutil, sys
sys.modules["ray"] = None
import tnt_jax.on_ray
for module in pkgutil.iter_modules(tnt_jax.on_ray.__path__, "tnt_jax.on_ray."):
    importlib.import_module(module.name)
print([name for name in ("jax", "numpy") if name in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_a_task_runs_on_the_cluster_of_the_tests(ray_cluster):
    import ray

    with ray.init(ray_cluster.address, log_to_driver=False):
        assert ray.get(ray.remote(lambda: 6 * 7).remote()) == 42
