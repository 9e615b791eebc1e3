"""Keras layers inside a step, and paths of variables with names for files.

Keras numbers unnamed layers in the order in which a process creates them, and prefixes the paths of
variables with the model's name depending on how it was built. In files a variable is therefore
named by its position, as in Keras's own files: by the attribute that holds its layer, or in a
Sequential or functional model by the layer's class and a number.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import keras

from tnt_jax import _jax
from tnt_jax.adapters.base import VariablePath
from tnt_jax.adapters.batch_statistics import real_row_moments
from tnt_jax.adapters.forward_passes import replaced


def require_trainable(model: keras.Model) -> None:
    """Raises a ValueError if a model cannot be trained on several ranks."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"The layer {layer.name!r} of the Keras model {model.name!r} is stateful: it keeps "
                "a state for each row of a batch, and rows lie on different ranks. Make it with "
                "stateful=False, and give it whole sequences."
            )
    trained = model.trainable_variables
    direct = [v.path for v in trained if getattr(v, "overwrite_with_gradient", False)]
    if direct:
        raise ValueError(
            f"The Keras model {model.name!r} trains in float8: the scales {', '.join(direct[:4])} "
            "take their gradients as values, which cannot be summed over ranks. Use the policy "
            "'mixed_bfloat16' or 'mixed_float16'."
        )
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "keras.distribution is set, so Keras itself lays variables out on the devices. Leave "
            "it out: a tnt_jax.Model uses all devices of the job. "
            "keras.distribution.set_distribution(None) takes it back."
        )


# The name that Keras gives to an unnamed variable.
_AUTOMATIC = re.compile(r"variable(_\d+)?")


def paths_of(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> "OrderedDict[VariablePath, keras.Variable]":
    """Returns the variables of a model by path, in their order; equal paths are numbered."""
    names = _names(model)
    numbered = enumerate(_numbered(((v.path, v) for v in variables), separator="#"))
    return OrderedDict(
        (VariablePath(path, names.get(id(variable), f"variables/{index}")), variable)
        for index, (path, variable) in numbered
    )


def _names(model: keras.Model) -> dict[int, str]:
    """Returns the names of all layers' variables by `id`; the first use of a layer names it."""
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
    # As in Keras's own files; the class Functional has no public name.
    if layer._obj_type() in ("Sequential", "Functional"):
        in_order = [remaining.pop(id(child)) for child in layer.layers if id(child) in remaining]
        yield from ((f"layers/{name}", child) for name, child in _by_class(in_order))
    held = list(_held(layer, remaining))
    yield from held
    for _, child in held:
        remaining.pop(id(child), None)
    yield from _by_class(remaining.values())


def _held(
    layer: keras.Layer, wanted: Mapping[int, keras.Layer]
) -> Iterator[tuple[str, keras.Layer]]:
    """Yields those of the wanted layers, given by `id`, that attributes, lists or dicts hold."""
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


def _by_class(layers: Iterable[keras.Layer]) -> Iterator[tuple[str, keras.Layer]]:
    return _numbered((type(layer).__name__, layer) for layer in layers)


def _numbered(named: Iterable[tuple[str, Any]], separator: str = "_") -> Iterator[tuple[str, Any]]:
    """Yields names and values; repeated names are numbered."""
    seen: Counter[str] = Counter()
    for name, value in named:
        yield f"{name}{separator}{seen[name]}" if seen[name] else name, value
        seen[name] += 1


_moments = keras.layers.BatchNormalization._moments


@contextmanager
def layers_of_a_rank(
    layers: list[keras.Layer],
    *,
    key: jax.Array,
    mask: jax.Array | None,
    num_rows: int,
    synchronized: bool,
) -> Iterator[list[Any]]:
    """Traces all layers over one rank's rows, as part of the global batch, in the `with` block.

    The key stands for the states of all seed generators. If `synchronized`, the statistics of batch
    normalisation are those of all ranks. Yields an entry for each activity regularizer loss that
    leaves out padded rows.
    """
    draws = count()

    def next_key(generator: keras.random.SeedGenerator, ordered: bool = True) -> jax.Array:
        return jax.random.fold_in(key, next(draws))

    def moments(layer: keras.layers.BatchNormalization, inputs: jax.Array, given: Any) -> Any:
        is_of_rows = inputs.shape[0] == num_rows and layer.axis % inputs.ndim != 0
        if given is not None or not is_of_rows or (mask is None and not synchronized):
            return _moments(layer, inputs, given)
        rows = jnp.ones(num_rows, jnp.float32) if mask is None else mask
        axes = _jax.rank_axes() if synchronized else None
        return real_row_moments(inputs, rows, feature_dim=layer.axis, axis_name=axes)

    with ExitStack() as stack:
        stack.enter_context(replaced(keras.random.SeedGenerator, {"next": next_key}))
        stack.enter_context(replaced(keras.layers.BatchNormalization, {"_moments": moments}))
        yield [] if mask is None else stack.enter_context(_regularising_real_rows(layers, mask))


@contextmanager
def keras_batch_norm_off() -> Iterator[None]:
    """Lets all batch normalisation use its moving statistics in the `with` block."""
    original = keras.layers.BatchNormalization.call

    def call(layer: Any, inputs: jax.Array, training: Any = None, mask: Any = None) -> Any:
        return original(layer, inputs, training=False, mask=mask)

    with replaced(keras.layers.BatchNormalization, {"call": call}):
        yield


@contextmanager
def _regularising_real_rows(layers: list[keras.Layer], mask: jax.Array) -> Iterator[list[Any]]:
    """Makes activity regularizers, which Keras averages over rows, average over real rows."""
    originals = [(x, x.activity_regularizer) for x in layers if x.activity_regularizer is not None]
    real_rows = jnp.maximum(jnp.sum(mask), 1)
    regularized_outputs: list[Any] = []

    def of_real_rows(regularizer: Any) -> Callable:
        def regularize(outputs: jax.Array) -> jax.Array:
            if outputs.shape[:1] != mask.shape:
                return regularizer(outputs)
            regularized_outputs.append(outputs)
            shaped = mask.reshape(-1, *(1,) * (outputs.ndim - 1))
            return regularizer(jnp.where(shaped != 0, outputs, 0)) * (mask.shape[0] / real_rows)

        return regularize

    try:
        for layer, regularizer in originals:
            layer.activity_regularizer = of_real_rows(regularizer)
        yield regularized_outputs
    finally:
        for layer, regularizer in originals:
            layer.activity_regularizer = regularizer
