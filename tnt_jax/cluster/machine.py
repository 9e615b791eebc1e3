"""Tells whether processes run on the same machine, and in the same part of it."""

import os
from typing import Literal


def machine_id(namespace: Literal["net", "pid"]) -> str:
    """Returns an identifier that processes of one machine have in common.

    Hosts that share a kernel, such as containers, are told apart by their namespaces.

    Args:
        namespace: `"net"` for processes that share addresses, `"pid"` for those that can see one
            another's process ids.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat(f'/proc/self/ns/{namespace}').st_ino}"
