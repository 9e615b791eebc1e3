"""Recordings of the profiler, in memory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from tnt_jax._jax.fallbacks import or_plain


class _SessionInFolder:
    """Records to a folder, as JAX's documented profiler does."""

    def __init__(self, options: ProfileOptions) -> None:
        self._folder = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._folder.name, profiler_options=options)

    def stop(self) -> bytes:
        with self._folder as folder:
            jax.profiler.stop_trace()
            (recorded,) = Path(folder).rglob("*.xplane.pb")
            return recorded.read_bytes()


@or_plain(_SessionInFolder, lost="Profiles are written to a temporary folder first.")
def _session(options: ProfileOptions) -> Any:
    # Private: what `jax.profiler.trace` writes to a folder. Checked with JAX 0.10.0, 0.10.2 and
    # 0.12.0. A public session that returns what it has recorded would replace it.
    from jax._src.lib import _profiler  # pyright: ignore[reportAttributeAccessIssue]

    session = _profiler.ProfilerSession(options)
    if not hasattr(session, "stop"):
        raise AttributeError("ProfilerSession has no stop.")
    return session


class Recording:
    """The `ProfileData` of what the profiler has recorded; None as long as it records."""

    def __init__(self) -> None:
        self.data: Any = None


@contextmanager
def profile() -> Iterator[Recording]:
    """Records what devices and threads do in the block; a second profiler raises a RuntimeError."""
    options = ProfileOptions()
    # Calls of Python functions would slow down what is measured.
    options.python_tracer_level = 0
    recording = Recording()
    session = _session(options)
    try:
        yield recording
    finally:
        recorded = session.stop()
    recording.data = ProfileData.from_serialized_xspace(recorded)
