"""Decides from a path in which format a model or its weights are saved."""

from pathlib import Path

from tnt_jax.keras_compat.weight_files import H5_ENDING, SAFETENSORS_ENDING

# Common file extensions of formats that are not supported.
_OTHER_FILES = (
    ".h5", ".hdf5", ".npz", ".npy", ".pkl", ".pickle", ".msgpack", ".json", ".pt", ".pth", ".bin",
    ".ckpt", ".onnx", ".zip", ".tar",
    ".tflite", ".pb", ".joblib",
)  # fmt: skip


def is_file_name(path: Path, *, of_keras: bool) -> bool:
    """Returns whether a path is saved as one file rather than as a directory.

    Args:
        path: Where to save.
        of_keras: Whether the model wraps a Keras model.

    Raises:
        ValueError: If the extension is that of an unsupported format.
    """
    if path.name.endswith(
        (H5_ENDING, SAFETENSORS_ENDING, ".keras", *((".h5",) if of_keras else ()))
    ):
        return True
    if path.name.lower().endswith(_OTHER_FILES):
        whole = ".keras or .h5" if of_keras else ".keras"
        raise ValueError(
            f"{path} has an unsupported file extension. Save a whole model to a directory, a name "
            f"without an extension, or to a file ending in {whole}; save weights to a file ending "
            f"in {H5_ENDING} or {SAFETENSORS_ENDING}."
        )
    return False
