"""The logger `tnt_jax`: quiet on all processes but the master, with a rank prefix where several processes speak."""

import logging
import sys

from tnt_jax.settings import Settings

logger = logging.getLogger("tnt_jax")


def configure_logging(settings: Settings, *, rank: int, is_master: bool) -> None:
    """Sets level, format and filter of the logger `tnt_jax` from the settings.

    Only the master emits records, unless `TNT_LOG_ON_ALL_DEVICES` is set; then every line starts with the rank.
    Calling it again replaces the handler that the last call installed.
    """
    for handler in [h for h in logger.handlers if isinstance(h, _Handler)]:
        logger.removeHandler(handler)
    prefix = f"[rank {rank}] " if settings.log_on_all_devices else ""
    handler = _Handler()
    handler.setFormatter(logging.Formatter(f"{prefix}[tnt_jax] %(levelname)s: %(message)s"))
    handler.addFilter(lambda record: is_master or settings.log_on_all_devices)
    logger.addHandler(handler)
    logger.setLevel(settings.log_level)
    logger.propagate = False


class _Handler(logging.Handler):
    """Writes to whatever `sys.stderr` is at the time, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)
