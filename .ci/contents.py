"""Checks which files the archives in dist/ hold: `.ci/release` runs it after the build."""

import sys
import tarfile
import zipfile
from pathlib import Path

DIST = Path(__file__).parents[1] / "dist"
PACKAGE = Path(__file__).parents[1] / "tnt_jax"


def main() -> str:
    """Returns what is wrong, empty if nothing is."""
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    problems = [f"{wheel.name} lacks {name}" for name in sorted(expected - in_wheel)]
    problems += [f"{wheel.name} has {name}" for name in sorted(in_wheel - expected)]
    problems += [f"{sdist.name} lacks {name}" for name in sorted(expected - in_sdist)]
    left_out = ("benchmarks/results/", ".ci/", ".github/")
    problems += [f"{sdist.name} has {name}" for name in in_sdist if name.startswith(left_out)]
    return "\n".join(problems)


if __name__ == "__main__":
    sys.exit(main() or None)
