"""Joins the job just before JAX opens its devices, in the processes that `tnt-jax` starts.

The launcher adds this folder's parent to `PYTHONPATH`. JAX imports every module of the namespace
package `jax_plugins` and calls its `initialize()` when a script first asks for devices: after the
script has set its options, before it is too late to join.
"""

import os
import sys

from tnt_jax.cluster.clusters import is_started_by_script
from tnt_jax.distributed.joining.join import join_job


def initialize() -> None:
    """Joins the job, unless this process was started by one of its processes."""
    if is_started_by_script():
        return
    try:
        join_job()
    except BaseException as error:
        # JAX would log the error and continue, and this process would train alone.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)
