"""The file that `tnt-jax doctor --report` writes: what an issue needs, without secrets."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tnt_jax.files import replacing
from tnt_jax.launch.planning.environment import carried_environment
from tnt_jax.launch.planning.facts import package_version

_PACKAGES = (
    "tnt-jax jax jaxlib jax-cuda12-plugin jax-cuda13-plugin flax optax keras numpy tensorstore "
    "h5py safetensors tensorflow tensorflow-cpu tensorflow-datasets ray optuna grain torch"
).split()
_PREFIXES_OF_CLUSTERS = ("CUDA_", "SLURM_", "OMPI_", "PMIX_")
_SECRET = re.compile(r"secret|token|key|passw|credential|auth|cookie", re.IGNORECASE)
_USER_IN_URL = re.compile(r"//[^/@\s]*@")
_HIDDEN = "(hidden)"
_LIST_DEVICES = """
import json, jax
print(json.dumps([
    {"id": d.id, "platform": d.platform, "kind": d.device_kind, "process": d.process_index}
    for d in jax.devices()
]))
"""
_DEVICES_TIMEOUT_S = 120


def write_report(path: Path, diagnosis: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Writes versions, JAX's devices, the environment and what the doctor found as JSON."""
    report = {
        "python": sys.version,
        "platform": platform.platform(),
        "versions": {name: found for name in _PACKAGES if (found := package_version(name))},
        "devices": _list_devices(environ),
        "environment": shown_environment(environ),
        **diagnosis,
    }
    with replacing(path) as file:
        file.write_text(json.dumps(report, indent=2) + "\n")


def shown_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter to a job, without passwords and the home directory.

    A value is hidden if the name of its variable sounds like a secret. Variables of other programs
    are left out.
    """
    of_clusters = {
        name: value for name, value in environ.items() if name.startswith(_PREFIXES_OF_CLUSTERS)
    }
    chosen = carried_environment(environ) | of_clusters
    return {
        name: _HIDDEN if _SECRET.search(name) else _without_user(value, environ.get("HOME", ""))
        for name, value in sorted(chosen.items())
    }


def _without_user(value: str, home: str) -> str:
    value = _USER_IN_URL.sub(f"//{_HIDDEN}@", value)
    return value.replace(home, "~") if len(home) > 1 else value


def _list_devices(environ: Mapping[str, str]) -> list[dict[str, Any]] | str:
    """Returns the devices of this host as JAX lists them, or the end of what it says instead."""
    command = [sys.executable, "-c", _LIST_DEVICES]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_DEVICES_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"JAX has not listed its devices within {_DEVICES_TIMEOUT_S} s."
    if done.returncode:
        return _without_user(done.stderr[-2000:], os.path.expanduser("~"))
    return json.loads(done.stdout.splitlines()[-1])
