"""Paths of a Keras model's variables, and names for files that follow from its structure.

Keras numbers unnamed layers in the order in which a process creates them, and prefixes the paths of
variables with the model's name depending on how it was built. In files a variable is therefore
named by its position, as in Keras's own files: by the attribute that holds its layer, or in a
Sequential or functional model by the layer's class and a number.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tnt_jax.adapters.variable_path import VariablePath

# The name that Keras gives to an unnamed variable.
_AUTOMATIC = re.compile(r"variable(_\d+)?")


def paths_of(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> "OrderedDict[VariablePath, keras.Variable]":
    """Returns the variables of a model by path, in their order.

    Equal paths, which occur in subclassed models, are numbered.
    """
    names = _names(model)
    seen: Counter[str] = Counter()
    paths = OrderedDict()
    for index, variable in enumerate(variables):
        number = seen[variable.path]
        path = f"{variable.path}#{number}" if number else variable.path
        paths[VariablePath(path, names.get(id(variable), f"variables/{index}"))] = variable
        seen[variable.path] += 1
    return paths


def _names(model: keras.Model) -> dict[int, str]:
    """Returns the names of the variables of all layers by `id`.

    A layer that is used several times has the name of its first use.
    """
    names: dict[int, str] = {}
    seen: set[int] = set()

    def visit(layer: keras.Layer, prefix: str) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        for name, variable in _numbered(_own_variables(layer)):
            names.setdefault(id(variable), prefix + name)
        for name, child in _children(layer):
            visit(child, f"{prefix}{name}/")

    visit(model, "")
    return names


def _own_variables(layer: keras.Layer) -> Iterator[tuple[str, keras.Variable]]:
    for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
        yield "variable" if _AUTOMATIC.fullmatch(variable.name) else variable.name, variable
    for generator in layer._seed_generators:
        yield "seed_generator", generator.state


def _children(layer: keras.Layer) -> Iterator[tuple[str, keras.Layer]]:
    remaining = {id(child): child for child in layer._layers}
    if layer._obj_type() in (
        "Sequential",
        "Functional",
    ):  # As in Keras's own files; the class Functional has no public name.
        in_order = [remaining.pop(id(child)) for child in layer.layers if id(child) in remaining]
        yield from ((f"layers/{name}", child) for name, child in _by_class(in_order))
    held = list(_held(layer, remaining))
    yield from held
    yield from _by_class(
        [child for child in remaining.values() if all(child is not other for _, other in held)]
    )


def _held(
    layer: keras.Layer, wanted: Mapping[int, keras.Layer]
) -> Iterator[tuple[str, keras.Layer]]:
    """Yields those of the wanted layers, given by `id`, that attributes of a layer hold.

    They may be inside lists and dicts.
    """
    searched: set[int] = set()

    def search(name: str, value: Any) -> Iterator[tuple[str, keras.Layer]]:
        if id(value) in wanted:
            yield name, value
        elif isinstance(value, (list, tuple, Mapping)) and id(value) not in searched:
            searched.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                yield from search(f"{name}/{key}", item)

    for name, value in vars(layer).items():
        if name != "_layers":
            yield from search(name, value)


def _by_class(layers: Sequence[keras.Layer]) -> Iterator[tuple[str, keras.Layer]]:
    return _numbered((type(layer).__name__, layer) for layer in layers)


def _numbered(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields names and values; repeated names are numbered."""
    seen: Counter[str] = Counter()
    for name, value in named:
        yield f"{name}_{seen[name]}" if seen[name] else name, value
        seen[name] += 1
