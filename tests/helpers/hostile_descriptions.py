"""A script: loads 1000 damaged and hostile descriptions of models and prints what each ended in,
and what it did meanwhile.

Run it as `python hostile_descriptions.py seed count`. Audit events tell what a description did:
Python raises one for every file that is opened, module that is imported and process that is
started.
"""

import collections
import importlib
import json
import linecache
import random
import sys
from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp
import keras

import tnt_jax as tnt
from tnt_jax.keras_compat.facade.saved_models import _compile, model_from_json
from tnt_jax.keras_compat.saving.descriptions import Rebuilder, describe

WATCHED = (
    "open",
    "import",
    "exec",
    "compile",
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "ctypes.",
    "pickle.",
    "marshal.",
    "pty.",
)
NAMES = [
    "os:system", "posix:system", "subprocess:Popen", "subprocess:run", "builtins:eval",
    "builtins:exec", "builtins:__import__",
    "builtins:open", "this:s", "antigravity:x", "jax.numpy:save", "jax.numpy:load",
    "jax.numpy:fromfile", "jax.numpy:frombuffer",
    "jax.numpy:vectorize", "jax.numpy.linalg:os.system", "flax.linen:Module",
    "flax.linen:module.sys.modules", "flax.linen:tabulate",
    "optax:inject_hyperparams", "optax:_src.base", "tnt_jax.launch.processtree:ProcessTree",
    "tnt_jax.losses:get",
    "tnt_jax.keras_compat.facade.saved_models:load_model", "tnt_jax.keras_compat.callbacks:LambdaCallback",
    "tnt_jax.data:synthetic",
    "functools:reduce", "pathlib:Path", "pathlib:Path.unlink", "shutil:rmtree",
    "importlib:import_module", "pickle:loads",
    "webbrowser:open", "numpy:load", "ctypes:CDLL", "code:interact", "keras_hub.evil",
    "keras.src.evil", "keras.utils", "", ":", "a:",
    "__main__:NAMES", "os.system", "../../etc/passwd", "flax.linen:Dense.__class__",
    "jax.numpy:__builtins__",
]  # fmt: skip
KERAS = [
    {
        "class_name": "__lambda__",
        "config": {"value": "4wAAAAA=", "defaults": None, "closure": None},
    },
    {"class_name": "function", "config": "system", "module": "os", "registered_name": "system"},
    {
        "class_name": "function",
        "config": "get_file",
        "module": "keras.utils",
        "registered_name": "get_file",
    },
    {
        "class_name": "Lambda",
        "module": "keras.layers",
        "config": {"function": {"class_name": "__lambda__", "config": {"value": "x"}}},
    },
    {
        "class_name": "Popen",
        "module": "subprocess",
        "config": {"args": ["id"]},
        "registered_name": None,
    },
    {
        "class_name": "StringLookup",
        "module": "keras.layers",
        "config": {"vocabulary": "/etc/passwd"},
        "registered_name": None,
    },
    {"class_name": "Model", "module": "keras_hub.models", "config": {}, "registered_name": None},
]


DEEP: list = []
for _ in range(20_000):
    DEEP = [DEEP]


def seeds():
    """Returns valid descriptions: pairs of a configuration and the arguments of compile."""
    keras_model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, activation="relu"), keras.layers.Dropout(0.1)]
    )
    modules = [
        nn.Sequential([nn.Dense(8, dtype=jnp.bfloat16), nn.relu, nn.Dense(3)]),
        tnt.models.resnet18(num_classes=5),
        tnt.models.CNN(),
        tnt.models.Transformer(vocab_size=11, width=8, num_heads=2),
        keras_model,
    ]
    losses = [
        tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.MeanSquaredError(),
        "mse",
    ]
    schedule = tnt.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizers = [
        tnt.optimizers.AdamW(schedule, clipnorm=float("inf")),
        keras.optimizers.SGD(0.1, momentum=0.9),
        "adam",
    ]
    for index, module in enumerate(modules):
        model = tnt.Model(module, frozen=("a/*",), seed=3)
        loss, optimizer = losses[index % 3], optimizers[index % 3]
        given = {
            "optimizer": optimizer,
            "loss": loss,
            "metrics": ["accuracy", tnt.metrics.AUC(num_thresholds=20)],
        }
        yield json.loads(json.dumps([model.get_config(), describe(given)]))


def places(node, path=()):
    """Yields the path of every node of a JSON value."""
    yield path
    items = enumerate(node) if isinstance(node, list) else ()
    if isinstance(node, dict):
        items = node.items()
    for key, value in items:
        yield from places(value, (*path, key))


def hostile(rng, node):
    """Returns something else for a node."""
    name = rng.choice(NAMES)
    return rng.choice([
        name, {"import": name}, {"linen": [name, {}, None]}, {"object": [name, [], {"dict": []}]},
        {"keras": rng.choice(KERAS)},
        {"partial": [{"import": name}, ["id"], {"dict": []}]},
        {"partial": [{"import": "jax.numpy:tanh"}, node, {"dict": [["a", 1]]}]},
        {"linen": ["flax.linen:Dense", {"features": node, "parent": name, "name": name}, name]},
        {"dtype": name}, {"float": name},
        {"object": ["tnt_jax.optimizers:Adam", [node], {"dict": [["learning_rate", {"import": name}], ["__class__", name]]}]},
        {name: node}, {"__class__": name},
        {"class_name": name, "config": node, "module": name.split(":")[0]}, rng.choice(KERAS),
        {},
        None, True, -1, 10**30, 1e308, -0.0, "x" * 5000, [node] * 50,
        DEEP if rng.random() < 0.2 else [[[node]]], {"dict": [[node, node]]}, {"tuple": node},
    ])  # fmt: skip


def mutated(rng, description):
    """Returns a description with one to three nodes replaced."""
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(places(description)))
        parent = {"root": description}
        keys = ("root", *path)
        node = parent
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = hostile(rng, node[keys[-1]])
        description = parent["root"]
        if not isinstance(description, list) or len(description) != 2:
            return [description, description]
        if sum(1 for _ in places_up_to(description, 900)) >= 900:
            break
    return description


def places_up_to(description, limit):
    """Yields nodes without recursion, a few at most: a deep one is not changed again."""
    stack = [description]
    while stack and limit:
        limit -= 1
        node = stack.pop()
        yield node
        if isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def load(description):
    """Loads one description as `load_model` does."""
    config, given = description
    try:
        text = json.dumps(config)
    except RecursionError:
        text = "[" * 100_000
    model = model_from_json(text)
    _compile(model, Path(), {"compile": given}, Rebuilder())
    model.optimizer  # noqa: B018 (what a property does counts, too)


def is_for_traceback():
    """Tells whether Python, or JAX with an error, reads lines of the source that runs."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != linecache.__file__:
        frame = frame.f_back
    return frame is not None


def main():
    """Prints how many descriptions ended how, and everything that was done."""
    rng = random.Random(int(sys.argv[1]))
    valid = list(seeds())
    done = []
    watching = False

    def hook(event, arguments):
        if watching and event.startswith(WATCHED) and not is_for_traceback():
            done.append([event, repr(arguments)[:200]])

    for description in valid:
        load(json.loads(json.dumps(description)))
    # What the package imports on first use is no doing of a description.
    importlib.import_module("tnt_jax.reproducible.steps")
    sys.addaudithook(hook)
    outcomes = collections.Counter()
    for _ in range(int(sys.argv[2])):
        description = mutated(rng, json.loads(json.dumps(rng.choice(valid))))
        before = set(sys.modules)
        watching = True
        try:
            load(description)
            outcome = "model"
        except Exception as error:  # What is raised is what the test looks at.
            outcome = type(error).__name__
            if outcome not in ("ValueError", "TypeError"):
                print(outcome, str(error)[:300], file=sys.stderr)
        watching = False
        outcomes[outcome] += 1
        done += [["new module", name] for name in set(sys.modules) - before]
    found, watching = list(done), True
    Rebuilder(trust=True)({"import": "tabnanny:check"})
    print(
        json.dumps(
            {
                "outcomes": outcomes,
                "done": found,
                "seen_when_trusted": sorted({event for event, _ in done[len(found) :]}),
            }
        )
    )


if __name__ == "__main__":
    main()
