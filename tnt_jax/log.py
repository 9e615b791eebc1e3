"""The logger `tnt_jax`: quiet on all processes but the master.

Where several processes write, each line starts with a rank.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from tnt_jax.settings import Settings

logger = logging.getLogger("tnt_jax")


def configure_logging(settings: Settings, *, rank: int, is_master: bool) -> None:
    """Sets level, format and filter of the logger `tnt_jax` from the settings.

    Only the master emits records, unless `TNT_LOG_ON_ALL_DEVICES` is set; then every line starts
    with the rank. Records with `extra={"on_every_process": True}` are emitted on any process. A
    second call replaces the handler of the first.
    """
    for handler in [h for h in logger.handlers if isinstance(h, _Handler)]:
        logger.removeHandler(handler)
    prefix = f"[rank {rank}] " if settings.log_on_all_devices else ""
    handler = _Handler()
    handler.setFormatter(logging.Formatter(f"{prefix}[tnt_jax] %(levelname)s: %(message)s"))
    handler.addFilter(
        lambda record: (
            is_master or settings.log_on_all_devices or getattr(record, "on_every_process", False)
        )
    )
    logger.addHandler(handler)
    logger.setLevel(settings.log_level)
    logger.propagate = False


def report_to_launcher(line: str) -> None:
    """Writes a line for the launcher to the process's own standard output."""
    # A script may have left a line open, or replaced sys.stdout.
    stream: Any = sys.__stdout__
    stream.write(f"\n{line}\n")
    stream.flush()


class _Handler(logging.Handler):
    """Writes to whatever `sys.stderr` is at the time, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        with beside_bars():
            print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def beside_bars() -> Iterator[None]:
    """Hides progress bars while something is written to `sys.stderr`, then redraws them."""
    tqdm = sys.modules.get("tqdm")
    with nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr):
        yield
