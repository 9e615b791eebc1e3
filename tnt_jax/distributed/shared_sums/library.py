"""Compiles `sums.c` for the installed version of JAX, once for each user of a machine."""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

_SOURCE = Path(__file__).with_name("sums.c")
_OPTIONS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread")
_COMPILE_S = 60


def load_library() -> ctypes.CDLL:
    """Returns the library, which is compiled if this user has not done so before.

    Raises:
        OSError: If there is no C compiler, or it fails; the text says why.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise OSError("there is no C compiler (cc)")
    known = (
        _SOURCE.read_bytes(),
        importlib.metadata.version("jaxlib"),
        platform.machine(),
        compiler,
        _OPTIONS,
    )
    name = f"sums-{_digest(repr(known).encode())}"
    folder = _own_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="tnt_jax-") as temporary:
            return _compiled(compiler, Path(temporary), name)
    with _locked(folder / "sums.lock"):
        for file in folder.glob(f"{name}-*.so"):
            # A process dies that loads a file which was cut short.
            if file.stem == f"{name}-{_digest(file.read_bytes())}":
                return ctypes.CDLL(str(file))
            file.unlink()
        return _compiled(compiler, folder, name)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _own_folder() -> Path | None:
    """Returns a folder that only this user can write to, or None if there is none."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(cache) / "tnt_jax" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
    except OSError:
        return None
    is_own = facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
    return folder if is_own and os.access(folder, os.W_OK) else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiled(compiler: str, folder: Path, name: str) -> ctypes.CDLL:
    partial = folder / f"{name}.{os.getpid()}"
    command = [
        *compiler.split(),
        *_OPTIONS,
        f"-I{jax.ffi.include_dir()}",
        str(_SOURCE),
        "-o",
        str(partial),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        path = partial.replace(folder / f"{name}-{_digest(partial.read_bytes())}.so")
    except subprocess.CalledProcessError as error:
        reasons = [line for line in error.stderr.splitlines() if "error" in line]
        reason = reasons[0] if reasons else f"exit status {error.returncode}"
        raise OSError(f"the C compiler ({compiler}) failed: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the C compiler took longer than {_COMPILE_S} s") from error
    finally:
        partial.unlink(missing_ok=True)
    return ctypes.CDLL(str(path))
