"""Loading a model runs no code that the file chooses; what is standard loads by itself, what is the
user's is passed or trusted.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import h5py
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from damage import rewrite_file_checksums
from keras_beside import data
from long_params import long_but_last

import tnt_jax as tnt
from tnt_jax.keras_compat.saving.descriptions import (
    NotDescribable,
    Rebuilder,
    describe,
    find,
    known_modules,
)


class Own(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class OwnLoss(tnt.losses.Loss):
    def call(self, y_true, y_pred):
        return jnp.mean((y_pred - jax.nn.one_hot(y_true, 3)) ** 2, axis=-1)


def own_loss(y_true, y_pred):
    return OwnLoss().call(y_true, y_pred)


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """Puts a module where Python finds it, and returns what tells whether it has been imported."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "evil_module.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nrun = lambda *args: None\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    yield (tmp_path / "ran").exists
    sys.modules.pop("evil_module", None)


def hostile(name="evil_module:run"):
    processes = "tnt_jax.launch.supervisor:Child"
    return [
        {"import": name},
        {"linen": [name, {}, None]},
        {"object": [name, [], {"dict": []}]},
        {"object": [processes, ["id"], {"dict": []}]},
        {"partial": [{"import": name}, ["id"], {"dict": []}]},
        {"linen": ["flax.linen:Sequential", {"layers": [{"import": name}]}, None]},
        {"linen": ["flax.linen:Dense", {"features": 3, "dtype": {"import": "os:system"}}, None]},
        {
            "keras": {
                "class_name": "run",
                "config": {},
                "module": "evil_module",
                "registered_name": None,
            }
        },
        {
            "keras": {
                "class_name": "function",
                "config": "system",
                "module": "os",
                "registered_name": "system",
            }
        },
        {"keras": {"class_name": "__lambda__", "config": {"value": "4wAAAAA="}}},
        {
            "keras": {
                "class_name": "Model",
                "config": {},
                "module": "keras_hub.models",
                "registered_name": None,
            }
        },
    ]


REFUSALS = "does not know by itself|Keras cannot create|which is not imported"
NAMED = [f"jax.numpy:{name}" for name in ("save", "load", "fromfile", "linalg", "vectorize")]
NAMED += [
    "flax.linen:Module",
    "flax.linen:tabulate",
    "optax:inject_hyperparams",
    "builtins:open",
    "tnt_jax.losses:get",
]
NAMED += [
    "flax.linen:Dense.__class__",
    "jax.numpy:tanh.__globals__",
    "tnt_jax.models:load_model",
    ":",
    "",
    "Dense",
]


@pytest.mark.parametrize("name", NAMED)
def test_only_what_is_listed_can_be_named(name):
    with pytest.raises(ValueError, match=r"does not know by itself"):
        Rebuilder()({"import": name})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Returns the directory of a saved model."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    model = tnt.Model(nn.Dense(3))
    model.compile("sgd", loss="mse")
    model.build((None, 4))
    model.save(folder)
    return folder


@pytest.mark.parametrize("index", range(len(hostile())))
@pytest.mark.parametrize("where", ["module", "options", "compile"])
def test_a_hostile_directory_runs_nothing(tmp_path, directory, evil, index, where):
    shutil.copytree(directory, tmp_path / "run")
    (notes_file,) = (tmp_path / "run").glob("*/about/metadata")
    about = json.loads(notes_file.read_text())
    notes, planted = about["notes"], hostile()[index]
    if where == "module":
        notes["config"]["module"] = planted
    else:
        pairs = (notes["config"]["options"] if where == "options" else notes["compile"])["dict"]
        pairs[0][1] = planted
    notes_file.write_text(json.dumps(about))
    rewrite_file_checksums(notes_file.parents[1])
    with pytest.raises(ValueError, match=REFUSALS):
        tnt.models.load_model(tmp_path / "run")
    assert not evil()
    with pytest.raises(ValueError, match=REFUSALS):
        tnt.models.model_from_json(json.dumps({"module": planted, "options": {"dict": []}}))
    assert not evil()


@pytest.mark.parametrize("index", range(len(hostile())))
def test_a_hostile_keras_file_runs_nothing(tmp_path, evil, index):
    model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
    model.compile("sgd", loss="mse")
    model.save(tmp_path / "a.keras")
    with (
        zipfile.ZipFile(tmp_path / "a.keras") as good,
        zipfile.ZipFile(tmp_path / "b.keras", "w") as bad,
    ):
        for name in good.namelist():
            text = good.read(name)
            if name == "tnt_jax.json":
                notes = json.loads(text)
                notes["compile"]["dict"][1][1] = hostile()[index]
                text = json.dumps(notes).encode()
            bad.writestr(name, text)
    with pytest.raises(ValueError, match=REFUSALS):
        tnt.models.load_model(tmp_path / "b.keras")
    assert not evil()


def test_keras_safe_mode_holds(tmp_path):
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x * 2)])
    keras.Model.save(inner, tmp_path / "a.keras")
    model = tnt.Model(inner)
    with pytest.raises(ValueError, match=r"safe_mode|unsafe"):
        tnt.models.load_model(tmp_path / "a.keras")
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(
        tnt.models.load_model(tmp_path / "a.keras", trust=True).predict(x, verbose=0),
        model.predict(x, verbose=0),
    )
    with pytest.raises(ValueError, match=r"trust=True allows what Keras's safe mode refuses"):
        tnt.models.model_from_config(model.get_config())
    assert isinstance(tnt.models.model_from_config(model.get_config(), trust=True), tnt.Model)


MODULES = [
    nn.Sequential(
        [
            nn.Dense(8, dtype=jnp.bfloat16, param_dtype=float),
            nn.relu,
            partial(nn.gelu, approximate=True),
            jnp.tanh,
        ]
    ),
    nn.Sequential(
        [
            nn.Conv(4, (3, 3), kernel_init=nn.initializers.zeros),
            nn.BatchNorm(True),
            nn.GroupNorm(2),
            nn.LayerNorm(),
        ]
    ),
    nn.RNN(nn.LSTMCell(4)),
    nn.MultiHeadDotProductAttention(2),
    nn.Embed(5, 3),
    tnt.models.resnet50(num_classes=3, dtype=jnp.bfloat16),
    tnt.models.resnet20(),
    tnt.models.TextClassifier(vocab_size=9),
    tnt.models.Transformer(vocab_size=9, width=8, num_heads=2),
]
OBJECTS = [
    tnt.optimizers.AdamW(tnt.schedules.CosineDecay(0.1, 10), clipnorm=1.0),
    tnt.losses.LossFunctionWrapper(optax.squared_error),
    [tnt.metrics.AUC(num_thresholds=5), "accuracy", tnt.metrics.sparse_categorical_accuracy],
    {
        "a": float("-inf"),
        3: np.float32(0.5),
        "dtype": np.dtype("int8"),
        "half": jnp.bfloat16,
        "nested": [(1, None), True],
    },
]


@pytest.mark.parametrize("value", [*MODULES, *OBJECTS], ids=lambda value: type(value).__name__)
def test_what_is_standard_comes_back_by_itself(value):
    written = json.dumps(describe(value))
    again = Rebuilder()(json.loads(written))
    assert json.dumps(describe(again)) == written
    assert type(again) is type(value)


def saved(tmp_path, loss):
    model = tnt.Model(Own())
    model.compile("sgd", loss=loss)
    model.fit(*data(), batch_size=8, verbose=0)
    model.save(tmp_path / "run")
    return model


@pytest.mark.parametrize("loss", [own_loss, OwnLoss()], ids=["function", "class"])
def test_what_is_the_users_must_be_passed_or_trusted(tmp_path, loss):
    model = saved(tmp_path, loss)
    name = "own_loss" if loss is own_loss else "OwnLoss"
    message = r'names "\S+:{0}", which load_model does not know by itself. Pass it as custom_objects=\{{"{0}": ...\}}, or pass trust=True'
    with pytest.raises(ValueError, match=message.format("Own")):
        tnt.models.load_model(tmp_path / "run")
    with pytest.raises(ValueError, match=message.format(name)):
        tnt.models.load_model(tmp_path / "run", custom_objects={"Own": Own})
    expected = model.fit(*data(), batch_size=8, verbose=0).history
    own = {f"{Own.__module__}:Own": Own, name: type(loss) if isinstance(loss, OwnLoss) else loss}
    for arguments in ({"custom_objects": own}, {"trust": True}):
        loaded = tnt.models.load_model(tmp_path / "run", **arguments)
        assert loaded.fit(*data(), batch_size=8, verbose=0).history == expected
    assert not tnt.models.load_model(
        tmp_path / "run", custom_objects={"Own": Own}, compile=False
    ).optimizer


def test_what_is_registered_with_keras_is_known(tmp_path, monkeypatch):
    model = saved(tmp_path, own_loss)
    expected = model.fit(*data(), batch_size=8, verbose=0).history
    for own in (Own, own_loss):
        monkeypatch.setitem(keras.saving.get_custom_objects(), f"mine>{own.__name__}", own)
    loaded = tnt.models.load_model(tmp_path / "run")
    assert loaded.fit(*data(), batch_size=8, verbose=0).history == expected


def test_a_wrong_object_in_place_of_a_class_is_an_error(tmp_path):
    saved(tmp_path, own_loss)
    with pytest.raises(ValueError, match=r"test_loading_safely:Own is not a flax.linen.Module"):
        tnt.models.load_model(tmp_path / "run", custom_objects={"Own": print})


def test_a_function_inside_another_is_not_written():
    with pytest.raises(NotDescribable, match=r"defined inside a function"):
        describe(nn.Sequential([lambda x: x]))


def test_the_table_holds_no_module_and_nothing_that_reads_or_writes():
    names = [
        f"{where}:{name}"
        for where, (module, names, base) in known_modules().items()
        for name in (*names, *(module.__all__ if base is not None else ()))
    ]
    table = {name: value for name in names if (value := find(name)) is not None}
    assert {"flax.linen:Dense", "tnt_jax.losses:Huber"} <= table.keys()
    for name, value in table.items():
        assert not isinstance(value, type(sys)), name
        assert not any(
            word in name.lower()
            for word in ("save", "load", "file", "open", "import", "eval", "exec")
        ), name


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("number", long_but_last(1000, 40))
def test_hostile_descriptions_do_nothing(number):
    script = Path(__file__).parents[1] / "helpers" / "hostile_descriptions.py"
    done = subprocess.run(
        [sys.executable, script, "0", str(number)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["done"] == []
    assert set(result["outcomes"]) <= {"ValueError", "TypeError", "model"}, done.stderr
    assert sum(result["outcomes"].values()) == number
    assert "open" in result["seen_when_trusted"], "The watch is blind."


def link_out(file, elsewhere):
    file["tnt_jax/params/kernel"] = h5py.ExternalLink(elsewhere, "tnt_jax/params/kernel")


def link_group_out(file, elsewhere):
    del file["tnt_jax"]
    file["tnt_jax"] = h5py.ExternalLink(elsewhere, "tnt_jax")


def link_inside(file, elsewhere):
    file["tnt_jax/params/kernel"] = h5py.SoftLink("/tnt_jax/step")


def store_outside(file, elsewhere):
    stored = file.create_dataset(
        "tnt_jax/params/kernel", (4, 3), np.float32, external=[(elsewhere, 0, 48)]
    )
    stored.attrs["dtype"] = "float32"


def map_outside(file, elsewhere):
    layout = h5py.VirtualLayout((4, 3), np.float32)
    layout[:] = h5py.VirtualSource(elsewhere, "tnt_jax/params/kernel", (4, 3))
    file.create_virtual_dataset("tnt_jax/params/kernel", layout).attrs["dtype"] = "float32"


def declare_much(file, elsewhere):
    stored = file.create_dataset(
        "tnt_jax/params/kernel", (2**40,), np.float32, chunks=(1024,), compression="gzip"
    )
    stored.attrs["dtype"] = "float32"


def contain_itself(file, elsewhere):
    file["tnt_jax/params/kernel"] = file["tnt_jax"]


def hold_objects(file, elsewhere):
    file.create_dataset("tnt_jax/params/kernel", data=["a", "b"], dtype=h5py.string_dtype()).attrs[
        "dtype"
    ] = "object"


@pytest.mark.parametrize(
    "damage",
    [
        link_out,
        link_group_out,
        link_inside,
        store_outside,
        map_outside,
        declare_much,
        contain_itself,
        hold_objects,
    ],
)
def test_weights_that_lead_out_of_their_file_are_refused(tmp_path, damage):
    for name in ("secret", "x"):
        model = tnt.Model(nn.Dense(3))
        model.build((None, 4))
        model.save_weights(tmp_path / f"{name}.weights.h5")
    with h5py.File(tmp_path / "x.weights.h5", "a") as file:
        del file["tnt_jax/params/kernel"]
        damage(file, str(tmp_path / "secret.weights.h5"))
    with pytest.raises(
        ValueError, match=r"x.weights.h5 has .*(do not load it|no array that this library wrote)"
    ):
        model.load_weights(tmp_path / "x.weights.h5")


def test_keras_weights_that_lead_out_of_their_file_are_refused(tmp_path):
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = tnt.Model(inner)
    model.compile("sgd", loss="mse")
    model.build((None, 4))
    model.save_weights(tmp_path / "x.weights.h5")
    shutil.copy(tmp_path / "x.weights.h5", tmp_path / "secret.h5")
    with h5py.File(tmp_path / "x.weights.h5", "a") as file:
        del file["layers"]
        file["layers"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "layers")
    with pytest.raises(ValueError, match=r"a link \(ExternalLink\) at /+layers.*do not load it"):
        model.load_weights(tmp_path / "x.weights.h5")
    model.save(tmp_path / "x.keras")
    with (
        zipfile.ZipFile(tmp_path / "x.keras") as whole,
        zipfile.ZipFile(tmp_path / "y.keras", "w") as changed,
    ):
        for name in whole.namelist():
            if name.endswith("weights.h5"):
                changed.write(tmp_path / "x.weights.h5", name)
            else:
                changed.writestr(name, whole.read(name))
    with pytest.raises(ValueError, match=r"a link \(ExternalLink\) at /+layers.*do not load it"):
        tnt.models.load_model(tmp_path / "y.keras")
