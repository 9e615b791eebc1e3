"""TensorFlow Datasets, prepared once and read by every process.

train = load("mnist", "train").shuffle(10_000).map(scale).batch(256)
train = RandomAccess(load_data_source("mnist", "train"), batch_size=256, shuffle=True)
"""

from pathlib import Path
from typing import Any

from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.log import logger


def load(
    name: Any,
    split: str = "train",
    *,
    data_dir: str | Path | None = None,
    as_supervised: bool = True,
    download: bool = True,
) -> Any:
    """Returns a split as a `tf.data.Dataset` of single examples in a fixed order.

    It is the same on every process. Batch it before you pass it to `fit`. Decoding is a map, so
    each process decodes only its own rows.

    Args:
        name: Name such as `mnist` or `mnist:3.0.1`, folder of a prepared dataset, or TFDS builder.
        split: Split such as `train` or `train[:80%]`.
        data_dir: Folder that holds prepared datasets; TFDS's own by default.
        as_supervised: Whether an example is `(input, target)` rather than a dictionary of all
            features.
        download: Whether a missing dataset is downloaded and prepared, by one process while the
            others wait.

    Raises:
        FileNotFoundError: If the dataset is missing and cannot be prepared.
        ValueError: If the split does not exist; the text lists the existing ones.
    """
    builder = _prepared_builder(name, split, data_dir, download)
    return builder.as_dataset(split=split, as_supervised=as_supervised, read_config=_read_config())


def load_own_share(
    name: Any,
    split: str = "train",
    *,
    data_dir: str | Path | None = None,
    as_supervised: bool = True,
    download: bool = True,
) -> Any:
    """Returns this process's even share of a split as a `tf.data.Dataset`.

    Pass it to `fit(..., tnt_distribute_dataset=False)`. Each process reads only its own part of the
    files. The batches are not those of one process, and shares may differ by one example. The
    arguments are those of `load`.
    """
    import tensorflow_datasets

    builder = _prepared_builder(name, split, data_dir, download)
    shares = tensorflow_datasets.even_splits(split, n=runtime.get_process_count())
    own = shares[runtime.get_process_index()]
    return builder.as_dataset(split=own, as_supervised=as_supervised, read_config=_read_config())


def load_data_source(
    name: Any, split: str = "train", *, data_dir: str | Path | None = None, download: bool = True
) -> Any:
    """Returns a split as a random-access dataset of dictionaries, for `RandomAccess`.

    Examples are decoded when they are fetched.

    The dataset must be prepared in a random-access format (`array_record`), which this function
    does. The arguments are those of `load`.

    Raises:
        ValueError: If the dataset was prepared in another format.
    """
    builder = _prepared_builder(name, split, data_dir, download, file_format="array_record")
    try:
        return builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise ValueError(
            f"{builder.info.full_name} in {builder.data_dir} is stored as "
            f"{builder.info.file_format.value}, which cannot be read at random. Prepare it again "
            "with file_format='array_record', or use load()."
        ) from error


def _prepared_builder(
    name: Any,
    split: str,
    data_dir: str | Path | None,
    download: bool,
    file_format: str | None = None,
) -> Any:
    """Returns the builder of a dataset that is there and has the split."""
    builder = _find_builder(name, data_dir, file_format)
    if download and not _is_prepared(builder) and runtime.is_master_rank():
        logger.info("Preparing %s in %s.", builder.info.full_name, builder.data_dir)
        try:
            builder.download_and_prepare()
        except Exception as error:
            reason = f"preparing it failed ({type(error).__name__}: {error})"
            raise FileNotFoundError(_not_there(builder, reason)) from error
    if download:
        collectives.barrier(timeout_s=24 * 3600)
        builder = _find_builder(name, data_dir, file_format)
    if not _is_prepared(builder):
        reason = "this host does not see it" if download else "downloading is switched off"
        raise FileNotFoundError(_not_there(builder, reason))
    known = list(builder.info.splits)
    for part in str(split).split("+"):
        if part.split("[")[0] not in known:
            raise ValueError(
                f"{builder.info.full_name} has the splits {', '.join(map(repr, known))}, but not "
                f"{part!r}."
            )
    return builder


def _find_builder(name: Any, data_dir: str | Path | None, file_format: str | None) -> Any:
    import tensorflow_datasets
    from tensorflow_datasets.core.registered import DatasetNotFoundError

    if not isinstance(name, (str, Path)):
        return name
    if (Path(name) / "dataset_info.json").is_file():
        return tensorflow_datasets.builder_from_directory(str(name))
    kwargs: dict[str, Any] = {} if file_format is None else {"file_format": file_format}
    folder = None if data_dir is None else str(data_dir)
    try:
        return tensorflow_datasets.builder(str(name), data_dir=folder, **kwargs)
    except DatasetNotFoundError as error:
        raise FileNotFoundError(
            f"There is no dataset {name!r}: TFDS does not know the name, and it is not a folder "
            "with a dataset_info.json."
        ) from error


def _is_prepared(builder: Any) -> bool:
    return (Path(builder.data_dir) / "dataset_info.json").is_file()


def _not_there(builder: Any, reason: str) -> str:
    return (
        f"{builder.info.full_name} is not in {builder.data_dir}, and {reason}. Prepare it where "
        f"there is a network, with `tfds build {builder.name} --data_dir=FOLDER`, copy FOLDER here "
        "and pass data_dir=FOLDER."
    )


def _read_config() -> Any:
    import tensorflow_datasets

    # A cache holds decoded examples: every process would decode all of them before the split. The
    # user may add one after decoding.
    return tensorflow_datasets.ReadConfig(try_autocache=False)
