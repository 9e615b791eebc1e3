"""Decides from a path in which format a model or its weights are saved."""

import re
from pathlib import Path

from tnt_jax.keras_compat.weight_files import H5_ENDING, SAFETENSORS_ENDING

# Letters after a dot are a file extension; `run.v2` and `epoch-0.93` are names of directories.
_EXTENSION = re.compile(r"\.([a-z]+|h(df)?5)", re.IGNORECASE)


def is_file_name(path: Path, *, of_keras: bool) -> bool:
    """Returns whether a path is that of one file rather than of a directory.

    Args:
        path: Where a model is saved.
        of_keras: Whether the model wraps a Keras model.

    Raises:
        ValueError: If the extension is not supported.
    """
    if path.name.endswith(
        (H5_ENDING, SAFETENSORS_ENDING, ".keras", *((".h5",) if of_keras else ()))
    ):
        return True
    if _EXTENSION.fullmatch(path.suffix):
        whole = ".keras or .h5" if of_keras else ".keras"
        raise ValueError(
            f"{path} has an unsupported file extension. A whole model is a directory, a name "
            f"without an extension, or a file ending in {whole}; weights are a file ending in "
            f"{H5_ENDING} or {SAFETENSORS_ENDING}."
        )
    return False
