"""The file that `tnt-jax doctor --report` writes: what an issue needs, without secrets."""

import json
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
# Its settings begin as TensorFlow's do, and hold what a user deploys.
_OF_TERRAFORM = ("TF_VAR_", "TF_CLI_")
_HIDDEN = "(hidden)"
# SLURM_JWT and precondition_transports of Open MPI are keys of these.
_SOUNDS_SECRET = (
    "secret|token|key|pass|pwd|credential|auth|cookie|jwt|signature|precondition_transports"
)
_SECRET = re.compile(_SOUNDS_SECRET, re.IGNORECASE)
_USER = re.compile(r"//\S*@|(?<![\w/])[\w.%-]+:[^\s/@]+@")
_NAME = rf"[\w-]*(?:{_SOUNDS_SECRET})[\w-]*"
# Within a value, as in `?token=...`, `{"password": "..."}`, `--api-key ...` and `Bearer ...`.
_NAMED = re.compile(
    rf"""((?:{_NAME}(?:=|["']\s*:\s*)|--{_NAME}\s+(?!-)|\b(?:Bearer|Basic)\s+)["']?)[^\s"'&,;}}]+""",
    re.IGNORECASE,
)
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
    shown = _without_secrets(report, environ.get("HOME", ""))
    with replacing(path) as file:
        file.write_text(json.dumps(shown, indent=2) + "\n")


def shown_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter to a job, without passwords and the home directory.

    A value is hidden if the name of its variable sounds like a secret. Variables of other programs
    are left out.
    """
    of_clusters = {
        name: value for name, value in environ.items() if name.startswith(_PREFIXES_OF_CLUSTERS)
    }
    chosen = carried_environment(environ) | of_clusters
    chosen = {name: value for name, value in chosen.items() if not name.startswith(_OF_TERRAFORM)}
    return {
        name: _HIDDEN if _SECRET.search(name) else _without_secrets(value, environ.get("HOME", ""))
        for name, value in sorted(chosen.items())
    }


def _without_secrets(value: Any, home: str) -> Any:
    """Returns a JSON value without users and passwords, named secrets and the home directory."""
    if isinstance(value, Mapping):
        return {name: _without_secrets(part, home) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_secrets(part, home) for part in value]
    if not isinstance(value, str):
        return value
    value = _USER.sub(lambda user: "//" * user[0].startswith("//") + f"{_HIDDEN}@", value)
    value = _NAMED.sub(rf"\g<1>{_HIDDEN}", value)
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
        return done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
