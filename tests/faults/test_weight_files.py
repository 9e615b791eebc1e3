"""A damaged file of weights or of a model is an error that names it, never other weights."""

import numpy as np
import pytest
from damage import random_flips
from keras_beside import Net, data

import tnt_jax as tnt

FLAX = ["run.safetensors", "run.weights.h5", "run.keras"]
KERAS = ["run.weights.h5", "run.keras", "run.h5", "run.safetensors"]


def flax_model():
    model = tnt.Model(Net())
    model.compile("adam", loss="mse")
    model.build(data()[0])
    return model


def keras_model():
    import keras

    model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
    model.compile("adam", loss="mse")
    return model


FORMS = [(flax_model, name) for name in FLAX] + [(keras_model, name) for name in KERAS]
# Few flips of four of the forms show nearly what many flips of all of them show.
SHORT = [*FORMS[:3], FORMS[3]]


@pytest.mark.parametrize(
    ("make", "name", "count"),
    [(*form, 40) for form in SHORT]
    + [pytest.param(*form, 600, marks=pytest.mark.long) for form in FORMS],
)
def test_a_flipped_bit_in_a_file_is_harmless_or_named(tmp_path, make, name, count):
    model = make()
    path = tmp_path / name
    is_whole = name in ("run.keras", "run.h5")
    (model.save if is_whole else model.save_weights)(path)
    expected = model.get_weights()
    told = []
    for _ in random_flips(tmp_path, count=count, seed=5):
        try:
            model.load_weights(path)
        except ValueError as error:
            told.append(str(error))
        for before, after in zip(expected, model.get_weights(), strict=True):
            np.testing.assert_array_equal(after, before)
    assert len(told) > 0.8 * count
    assert all(str(path) in text for text in told)
    model.load_weights(path)


DAMAGES = {
    "zeroed tail": lambda data, size: data[:-size] + bytes(size),
    "zeroed head": lambda data, size: bytes(size) + data[size:],
    "zeroed after a start": lambda data, size: data[:size] + bytes(len(data) - size),
    "truncated": lambda data, size: data[:-size],
    "longer": lambda data, size: data + bytes(size),
}
SIZES = [1, 2, 8, 12, 23, 24, 25, 32, 64, 100, 512, 1000, 2048, 4096, 5000, 8000, 10**6]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("make", "name"), FORMS)
def test_a_file_that_lost_a_part_is_named_or_as_it_was(tmp_path, make, name, damage):
    model = make()
    path = tmp_path / name
    (model.save if name in ("run.keras", "run.h5") else model.save_weights)(path)
    data, expected, passed = path.read_bytes(), model.get_weights(), []
    for size in [size for size in SIZES if size < len(data)]:
        path.write_bytes(DAMAGES[damage](data, size))
        try:
            model.load_weights(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017 (most sizes raise)
        else:
            passed += [size] if path.read_bytes() != data else []
        for before, after in zip(expected, model.get_weights(), strict=True):
            np.testing.assert_array_equal(after, before)
    # The checksum alone is gone, as after a change by another program. Archives end in what may grow.
    assert passed == [24] * (damage == "truncated" and path.suffix == ".h5") or (
        path.suffix == ".keras" and damage in ("zeroed tail", "longer")
    )


def test_damaged_arrays_of_safetensors_are_named(tmp_path):
    model = flax_model()
    model.save_weights(tmp_path / "a.safetensors")
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[-1] ^= 4
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"a.safetensors is damaged: params\.\S+ in it changed"):
        model.load_weights(tmp_path / "a.safetensors")


def test_files_of_other_programs_and_edited_ones_are_loaded(tmp_path):
    import h5py
    from safetensors.numpy import load_file, save_file

    model = flax_model()
    model.save_weights(tmp_path / "a.safetensors")
    model.save_weights(tmp_path / "a.weights.h5")
    save_file(
        {name: leaf + 1 for name, leaf in load_file(tmp_path / "a.safetensors").items()},
        tmp_path / "other.safetensors",
    )
    expected = [weight + 1 for weight in model.get_weights()]
    with h5py.File(tmp_path / "a.weights.h5", "r+") as file:
        file["tnt_jax/params"].visititems(
            lambda _, node: (
                node.write_direct(node[()] + 1) if isinstance(node, h5py.Dataset) else None
            )
        )
    for name in ("other.safetensors", "a.weights.h5"):
        model.set_weights([np.zeros_like(weight) for weight in expected])
        model.load_weights(tmp_path / name)
        for after, wanted in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(after, wanted)
