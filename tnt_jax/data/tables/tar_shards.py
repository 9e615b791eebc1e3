"""Tar shards as WebDataset writes them, whose samples are read by number.

train = tar_shards(sorted(glob("train-*.tar")), inputs="jpg", targets="cls")
model.fit(RandomAccess(train, batch_size=256, shuffle=True, num_workers=8), epochs=90)

Files of a shard that follow one another and have the same name up to its first dot are a sample;
what follows that dot names the column. https://github.com/webdataset/webdataset
"""

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tnt_jax.data.tables.columns import ColumnRoles, Names
from tnt_jax.data.tables.rows import Rows

Decoder = Callable[[bytes], Any]


def _image(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _npy(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)


# Pickles (`pyd`, `pth`) are no default: they run code that the file chooses.
_DECODERS: dict[str, Decoder] = {
    "cls": int,
    "id": int,
    "txt": bytes.decode,
    "json": json.loads,
    "npy": _npy,
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "ppm"), _image),
}


class _Part(NamedTuple):
    """Where a column of a sample is stored."""

    name: str
    start: int
    size: int


class _TarShards:
    """The samples of shards, of which the places of all files are known."""

    def __init__(
        self, paths: Sequence[str], roles: ColumnRoles, decoders: Mapping[str, Decoder]
    ) -> None:
        self._paths = list(paths)
        self._decoders = decoders
        indexes = [_index(path) for path in self._paths]
        samples = [sample for index in indexes for sample in index]
        names = roles.names([part.name for part in samples[0]]) if samples else []
        self._samples = [[p for p in sample if not names or p.name in names] for sample in samples]
        self._starts = np.cumsum([0, *map(len, indexes)])

    def __len__(self) -> int:
        return len(self._samples)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> dict[str, Any]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        path = self._paths[shard]
        with open(path, "rb", buffering=0) as file:
            return {part.name: self._read(path, file, part) for part in self._samples[index]}

    def _read(self, path: str, file: Any, part: _Part) -> Any:
        data = os.pread(file.fileno(), part.size, part.start)
        if len(data) < part.size:
            raise EOFError(f"{path} ends within the file {part.name!r} at byte {part.start}.")
        decoder = self._decoders.get(part.name, self._decoders.get(part.name.rpartition(".")[2]))
        if decoder is None:
            raise ValueError(
                f"{path} has a column {part.name!r}, for which there is no decoder. The decoders "
                f"are: {', '.join(self._decoders)}. Pass decoders={{{part.name!r}: ...}}, or name "
                "the columns that are needed."
            )
        try:
            return decoder(data)
        except Exception as error:
            error.add_note(f"This happened in {path}, column {part.name!r}, byte {part.start}.")
            raise


def _index(path: str) -> list[list[_Part]]:
    samples: list[list[_Part]] = []
    last = None
    with open(path, "rb") as file:
        try:
            for member in _members(file):
                folder, _, base = member.name.rpartition("/")
                stem, dot, name = base.partition(".")
                if not member.isfile() or not dot:
                    continue
                if (key := (folder, stem)) != last:
                    samples.append([])
                    last = key
                if any(part.name == name for part in samples[-1]):
                    raise ValueError(f"it has {member.name!r} twice")
                samples[-1].append(_Part(name, member.offset_data, member.size))
        except (tarfile.TarError, OSError, OverflowError, ValueError) as error:
            reason = f"{path} is no uncompressed tar file, or is damaged: {error}."
            raise ValueError(reason) from error
    return samples


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yields the files of an archive, which must be there as they are, up to its end."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.size < 0 or member.issparse():
                raise tarfile.ReadError(f"{member.name!r} is not stored as it is")
            yield member
        # `tarfile` takes a damaged head for the end.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no file and no end at byte {archive.offset}")


def tar_shards(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    inputs: Names | None = None,
    targets: Names | None = None,
    sample_weight: str | None = None,
    decoders: Mapping[str, Decoder] | None = None,
) -> Rows:
    """Returns the samples of WebDataset's tar shards as `(inputs, targets, sample_weight)`.

    Every process reads the heads of all files once, to know where they lie; after that it reads the
    files of its own samples alone, in any order. So shards need not be as many as processes, and
    shuffles go over all of them.

    Args:
        paths: An uncompressed tar file, or several in the order of their samples.
        inputs: As in `tnt_jax.data.columns`; columns are called `jpg`, `cls` and so on.
        targets: As in `tnt_jax.data.columns`.
        sample_weight: As in `tnt_jax.data.columns`.
        decoders: Functions from bytes to an array or number, by column or by its last part, in
            addition to those for `cls`, `id`, `txt`, `json`, `npy` and images (RGB, uint8).

    Raises:
        ValueError: If a shard is compressed or damaged, or there is no shard.
    """
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not paths:
        raise ValueError("There is no shard: tar_shards() needs one path at least.")
    roles = ColumnRoles(inputs, targets, sample_weight)
    table = _TarShards([os.fspath(path) for path in paths], roles, _DECODERS | dict(decoders or {}))
    return Rows(table, roles)
