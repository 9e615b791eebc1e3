"""TF_CONFIG: detects the processes of a TensorFlow multi-worker cluster description."""

import json
from collections.abc import Mapping
from typing import Any

from tnt_jax.cluster.job import Job

# TensorFlow's own order: the chief, once called master, comes first.
_KINDS = ("chief", "master", "worker")


def detect_tf_config(environ: Mapping[str, str]) -> Job | None:
    """Returns the job that `TF_CONFIG` describes; None without it or for a single process.

    Raises:
        ValueError: If `TF_CONFIG` is malformed, has parameter servers, or gives this process a role
            that does not train a model.
    """
    text = environ.get("TF_CONFIG")
    if not text:
        return None
    cluster, task = _parse(text)
    if cluster.get("ps"):
        raise ValueError(
            "TF_CONFIG has parameter servers (ps), but the processes of such a job all hold the "
            "same weights and sum their gradients, as with TensorFlow's "
            "MultiWorkerMirroredStrategy. Leave the ps entries out and start workers only, or "
            "train with tnt_jax.ParameterServer on a Ray cluster, which needs no TF_CONFIG."
        )
    if not any(cluster.get(kind) for kind in _KINDS):
        return None
    kind, index = task.get("type"), task.get("index")
    if (
        kind not in _KINDS
        or not isinstance(index, int)
        or not 0 <= index < len(cluster.get(kind, []))
    ):
        raise ValueError(
            f"TF_CONFIG's task must be one of the cluster's {', '.join(_KINDS)} entries, for "
            f"instance "
            f'{{"type": "worker", "index": 0}}, but is {json.dumps(task)}. An evaluator is not '
            f"needed: evaluate() runs on all processes."
        )
    addresses = [address for each in _KINDS for address in cluster.get(each, [])]
    if len(addresses) == 1:
        return None
    before = sum(len(cluster.get(each, [])) for each in _KINDS[: _KINDS.index(kind)])
    return Job(addresses[0], len(addresses), before + index, None, "TF_CONFIG")


def _parse(text: str) -> tuple[dict[str, list[str]], dict[str, Any]]:
    try:
        config = json.loads(text)
        return config.get("cluster") or {}, config.get("task") or {}
    except (json.JSONDecodeError, AttributeError, RecursionError) as error:
        raise ValueError(
            'TF_CONFIG must be JSON such as {"cluster": {"worker": ["host1:port", '
            '"host2:port"]}, "task": {"type": "worker", '
            f'"index": 0}}}}, but is {text!r:.200}.'
        ) from error
