"""What the profiler records, in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Private: what `jax.profiler.trace` writes to a folder. Checked with JAX 0.10.0 and 0.10.2. A
# public session that returns what it has recorded would replace it.
from jax._src.lib import _profiler  # pyright: ignore[reportAttributeAccessIssue]
from jax.profiler import ProfileData, ProfileOptions


class Recording:
    """What the profiler has recorded.

    Attributes:
        data: A `jax.profiler.ProfileData` of planes, lines and events; None as long as it records.
    """

    def __init__(self) -> None:
        self.data: Any = None


@contextmanager
def profile() -> Iterator[Recording]:
    """Records what devices and threads do in the block.

    Raises:
        RuntimeError: If the profiler records already.
    """
    options = ProfileOptions()
    # Calls of Python functions would slow down what is measured.
    options.python_tracer_level = 0
    recording = Recording()
    session = _profiler.ProfilerSession(options)
    try:
        yield recording
    finally:
        recorded = session.stop()
    recording.data = ProfileData.from_serialized_xspace(recorded)
