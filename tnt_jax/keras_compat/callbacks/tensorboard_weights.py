"""TensorBoard output other than curves: weight images, embeddings, and Keras model graphs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.log import logger

# Last parts of the paths of embedding tables: Flax's and Keras's.
_TABLES = ("embedding", "embeddings")


def finite_values(path: str, weight: np.ndarray) -> np.ndarray:
    """Returns the finite values of a weight in one dimension; warns if there are others."""
    values = np.asarray(weight, np.float32).ravel()
    is_finite = np.isfinite(values)
    if not is_finite.all():
        logger.warning(
            "%s: %d of %d values are NaN or infinite. TensorBoard shows the others.",
            path,
            np.sum(~is_finite),
            values.size,
        )
    return values[is_finite]


def as_images(weight: np.ndarray) -> np.ndarray | None:
    """Returns a weight as grey or colour images `[images, height, width, channels]` of bytes.

    The shapes are those of Keras. A vector becomes a column, and a matrix lies on its long side;
    each channel of a kernel `[height, width, channels]` is an image. Values are scaled from their
    minimum to their maximum; NaN becomes the minimum. The result is None for other shapes.
    """
    image = np.squeeze(weight)
    if image.ndim == 1:
        image = image[None, :, None, None]
    elif image.ndim == 2:
        image = (image.T if image.shape[0] > image.shape[1] else image)[None, :, :, None]
    elif image.ndim == 3:
        image = image.transpose(2, 0, 1)[..., None]
    if image.ndim != 4 or image.shape[-1] not in (1, 3, 4):
        return None
    image = np.asarray(image, np.float32)
    finite = image[np.isfinite(image)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    image = np.nan_to_num(image, nan=low, posinf=high, neginf=low)
    return ((image - low) / ((high - low) or 1) * 255).astype(np.uint8)


def write_images(writer: Any, weights: Mapping[str, np.ndarray], epoch: int) -> None:
    """Writes weights by path as images, `<path>/image`."""
    for path, weight in weights.items():
        images = as_images(weight)
        if images is not None:
            writer.add_images(f"{path}/image", images, epoch, dataformats="NHWC")


def embedding_tables(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the embedding tables `[entries, features]` among weights, by layer path."""
    tables = {
        path: weight
        for path, weight in weights.items()
        if path.split("/")[-1] in _TABLES and weight.ndim == 2
    }
    return {
        path.rpartition("/")[0] or path: np.asarray(weight, np.float32)
        for path, weight in tables.items()
    }


def write_embeddings(
    log_dir: str | os.PathLike[str],
    tables: Mapping[str, np.ndarray],
    metadata: str | Mapping[str, str] | None,
    epoch: int,
) -> None:
    """Writes embedding tables for TensorBoard's projector, which shows the last ones written.

    Args:
        log_dir: Folder of the run.
        tables: `[entries, features]` by layer.
        metadata: File with one label per line, relative to `log_dir`: one for all layers, or a dict
            by the path of a layer or its last part.
        epoch: Number of the epoch, for the names of the files.

    Raises:
        ValueError: If `metadata` names a layer without a table.
    """
    names = {name for layer in tables for name in (layer, layer.rpartition("/")[2])}
    unknown = [] if metadata is None or isinstance(metadata, str) else sorted(set(metadata) - names)
    if unknown:
        raise ValueError(
            f"embeddings_metadata names {', '.join(unknown)}, but the layers with embeddings are: "
            f"{', '.join(tables) or 'none'}."
        )
    entries = []
    for layer, table in tables.items():
        file = Path("train") / f"{layer.replace('/', '.')}.embeddings-{epoch}.tsv"
        (Path(log_dir) / file).parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(Path(log_dir) / file, table, delimiter="\t", fmt="%.6g")
        by_layer = {} if metadata is None or isinstance(metadata, str) else metadata
        labels = (
            metadata
            if isinstance(metadata, str)
            else by_layer.get(layer, by_layer.get(layer.rpartition("/")[2]))
        )
        lines = [
            f'tensor_name: "{layer}"',
            f'tensor_path: "{file}"',
            *([f'metadata_path: "{labels}"'] if labels else []),
        ]
        entries.append("embeddings {\n" + "".join(f"  {line}\n" for line in lines) + "}\n")
    if entries:
        (Path(log_dir) / "projector_config.pbtxt").write_text("".join(entries))


def write_keras_graph(writer: Any, module: Any) -> None:
    """Writes the layers of a functional or Sequential Keras model for TensorBoard's graph.

    As in Keras, other models are ignored.
    """
    if not (
        is_keras(module, "models.Model") and type(module).__name__ in ("Functional", "Sequential")
    ):
        return
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore
    from tensorboardX.proto.tensor_pb2 import TensorProto  # pyright: ignore

    try:
        text = module.to_json()
    # A custom layer may not be describable; as in Keras, only the graph is lost.
    except Exception as error:
        logger.warning(
            "TensorBoard shows no graph of %r, which cannot be written as JSON: %s",
            module.name,
            error,
        )
        return
    plugin = SummaryMetadata.PluginData(plugin_name="graph_keras_model", content=b"1")
    value = Summary.Value(
        tag="keras",
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=TensorProto(dtype="DT_STRING", string_val=[text.encode()]),
    )
    writer.file_writer.add_summary(Summary(value=[value]), 0)
