"""Meshes, `shard_map`, and arrays on several devices."""

import contextlib
import importlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tnt_jax._jax.fallbacks import or_plain
from tnt_jax.job import Slot

DATA_AXIS = "data"
# Axis over whose devices the parameters are sharded; rows are split over it as well.
FSDP_AXIS = "fsdp"
RANK_AXES = (DATA_AXIS, FSDP_AXIS)
# Axis over whose devices the layers of a pipeline are divided.
STAGE_AXIS = "stage"


def kind_of(x: Any) -> str:
    """Returns dtype and shape of an array, or of what stands for one: `float32[4, 3]`."""
    return f"{x.dtype.name}{list(x.shape)}"


def make_data_mesh(devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of one axis, `data`, over `devices` in the given order."""
    # jax.make_mesh makes Explicit axes by default and reorders devices; ranks must keep their
    # order.
    return Mesh(np.asarray(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def one_rank_mesh(device: Any, like: Mesh) -> Mesh:
    """Returns a mesh of one device, with those axes of another mesh that rows are split over."""
    names = [name for name in RANK_AXES if name in like.axis_names]
    devices = np.asarray(device).reshape((1,) * len(names))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def abstract_data_mesh(num_ranks: int) -> Any:
    """Returns a mesh of one axis, `data`, that has no devices: for tracing alone."""
    return AbstractMesh((num_ranks,), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def rank_axes(mesh: Any = None) -> str | tuple[str, ...]:
    """Returns the axis, or axes, of a mesh over which the rows of a batch are split.

    These are `data` and `fsdp`, without an axis of one device unless there is no other. Without a
    mesh they are among the axes that the traced function is mapped over.
    """
    sizes = mapped_sizes() if mesh is None else mesh.shape
    axes = tuple(name for name in RANK_AXES if sizes.get(name, 1) > 1) or (DATA_AXIS,)
    return axes[0] if len(axes) == 1 else axes


def num_ranks(mesh: Any) -> int:
    """Returns the number of parts that the rows of a batch are split into on a mesh."""
    return math.prod(mesh.shape.get(name, 1) for name in RANK_AXES)


def local_ranks(mesh: Mesh, process: int | None = None) -> list[int]:
    """Returns the ranks on a mesh, in order, of which a process (this one) has a device."""
    others = [axis for axis, name in enumerate(mesh.axis_names) if name not in RANK_AXES]
    # A rank is spread over the devices of the axes that do not split the rows.
    by_rank = np.moveaxis(mesh.devices, others, range(-len(others), 0)).reshape(num_ranks(mesh), -1)
    here = jax.process_index() if process is None else process
    owners = enumerate({device.process_index for device in devices} for devices in by_rank)
    return [rank for rank, processes in owners if here in processes]


def _own_mapped_sizes() -> dict[Any, int]:
    """Returns the sizes of those axes that the package names."""
    found = {}
    for name in (*RANK_AXES, STAGE_AXIS):
        with contextlib.suppress(NameError):
            found[name] = jax.lax.axis_size(name)
    return found


@or_plain(_own_mapped_sizes, lost="Messages do not name the axes of your own programs.")
def mapped_sizes() -> dict[Any, int]:
    """Returns the sizes of the axes that the traced function is mapped over, by name."""
    # Private. Checked with JAX 0.10.2 and 0.12.0. No public question exists.
    from jax._src import core

    return dict(core.get_axis_env().axis_sizes)


def mapped_axes() -> list[str]:
    """Returns the names of the axes that the traced function is mapped over."""
    return [name for name in mapped_sizes() if isinstance(name, str)]


def all_gather_invariant(x: jax.Array, axis_name: Any = None) -> jax.Array:
    """Returns the parts of all ranks concatenated, typed as equal on every rank, in `shard_map`."""
    axis_name = rank_axes() if axis_name is None else axis_name
    return jax.lax.all_gather(x, axis_name, axis=0, tiled=True, to="invarying")


def local_parts(x: jax.Array) -> Sequence[jax.Array]:
    """Returns the part of `x` on each device of this process, in the order of the mesh."""
    whole, parts = _known_parts.get().get(id(x), (None, ()))
    if whole is not None and whole() is x:
        return parts
    return _parts(x)


_SLOWER = "The steps of small models take longer."


@or_plain(lambda x: [shard.data for shard in x.addressable_shards], lost=_SLOWER)
def _parts(x: Any) -> Sequence[jax.Array]:
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. The public addressable_shards makes an
    # object with an index for each device, which takes longer than the step of a small model.
    return list(x._arrays)


def from_local_parts(
    parts: Sequence[jax.Array], shape: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """Returns the global array of `shape` made of `parts`, which lie in the order of the mesh."""
    kind = (shape, parts[0].dtype, sharding)
    avals = _avals.get()
    if kind not in avals:
        avals[kind] = jax.make_array_from_single_device_arrays(shape, sharding, list(parts)).aval
    whole = _joined(avals[kind], sharding, list(parts))
    # To take it apart again takes as long.
    known = _known_parts.get()
    key = id(whole)
    known[key] = ref(whole, lambda _: known.pop(key, None)), parts
    return whole


@or_plain(
    lambda aval, sharding, parts: jax.make_array_from_single_device_arrays(
        aval.shape, sharding, parts
    ),
    lost=_SLOWER,
)
def _joined(aval: Any, sharding: NamedSharding, parts: list[jax.Array]) -> jax.Array:
    # Private arguments. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. The public
    # make_array_from_single_device_arrays looks at every part again, which takes longer than to
    # start the programs of a small model.
    make: Any = type(parts[0])
    return make(aval, sharding, parts, committed=True, _skip_checks=True)


_avals = Slot[dict[Any, Any]](dict)
# Arrays that were put together, by their id, with the parts.
_known_parts = Slot[dict[int, tuple[ref[jax.Array], Sequence[jax.Array]]]](dict)


def is_varying(x: jax.Array, axis_name: str | None = None) -> bool:
    """Returns whether `x` may differ between ranks inside `shard_map`, over one axis or any."""
    return not varying_axes(x).isdisjoint(RANK_AXES if axis_name is None else (axis_name,))


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the mesh axes over which `x` may differ inside `shard_map`."""
    return varying_axes_of(jax.typeof(x))


def _printed_varying_axes(aval: Any) -> frozenset[str]:
    """Returns the axes in the text of a type, such as `float32[8]{V:data}`, `{V:(data,fsdp)}`."""
    found = re.search(r"\{V:\(?([^)}]*)", str(aval))
    return frozenset(re.findall(r"\w+", found[1])) if found else frozenset()


@or_plain(_printed_varying_axes, lost="Types are read from their text; tracing takes longer.")
def varying_axes_of(aval: Any) -> frozenset[str]:
    """Returns the mesh axes over which values of a type may differ inside `shard_map`."""
    # Undocumented. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. A public question would replace it.
    return frozenset(aval.mat.varying)


def make_varying(tree: Any) -> Any:
    """Marks every array of `tree` as different on each rank, so that its gradient stays local.

    Without it, `shard_map` sums gradients of replicated arrays itself, and a sum of ours makes them
    `num_ranks` times too large.
    """
    # A name that `vmap` binds has no types.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return vary(tree, [name for name in jax.tree.leaves(rank_axes()) if name in manual])


@or_plain(lambda: {}, lost="The exact gelu, and what else uses erf, trains on one rank alone.")
def polynomials() -> dict[Any, Callable]:
    """Returns the function `polynomial` by the module of JAX whose gradients call it."""
    if not hasattr(jax.lax, "polynomial"):  # JAX 0.10 and 0.11 have none.
        return {}
    # Private. Checked with JAX 0.12.0. The gradients of erf and erfc call it with constants, which
    # `shard_map` refuses beside varying values; it can go when JAX marks such constants itself.
    module = importlib.import_module("jax._src.lax.erf")  # Its package has a function of its name.
    return {module: module.polynomial}


def vary(tree: Any, axes: Iterable[str]) -> Any:
    """Marks every array of `tree` as different along mesh axes, inside `shard_map`."""
    axes = tuple(axes)

    def vary_one(x: Any) -> jax.Array:
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
        known = varying_axes(x)
        missing = tuple(name for name in axes if name not in known)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary_one, tree)


def zeros_like(tree: Any) -> Any:
    """Returns zeros in the place of arrays, varying where these do."""
    zeros = jax.tree.map(jnp.zeros_like, tree)
    return jax.tree.map(lambda x, y: make_varying(y) if is_varying(x) else y, tree, zeros)


def local_copy(x: Any) -> Any:
    """Returns this process's copy of a replicated array; other values as they are."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return x
    is_elsewhere_too = x.is_fully_replicated and not x.is_fully_addressable
    return x.addressable_data(0) if is_elsewhere_too else x


def finished(tree: Any) -> Any:
    """Returns arrays once they are computed, so that NumPy may read them."""
    # NumPy reads the array without asking. Checked with jaxlib 0.10.2 on CPUs: where there was no
    # memory for the array itself, that ends the process or waits for ever.
    return jax.block_until_ready(tree)


def is_key(x: Any) -> bool:
    """Returns whether an array, or what stands for one, holds typed random keys."""
    return jnp.issubdtype(getattr(x, "dtype", np.bool_), jax.dtypes.prng_key)


def key_words(x: Any) -> Any:
    """Returns the words of typed random keys, and anything else as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts host arrays on every device of `mesh`; each process must pass the same values."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def put(x: Any) -> jax.Array:
        if is_key(x):
            words = put(jax.random.key_data(x))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        # A copy, because buffers of the training state are donated and the caller keeps its own.
        host = np.array(x)
        return jax.make_array_from_process_local_data(sharding, host, host.shape)

    return jax.tree.map(put, tree)


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Places arrays `[ranks, ...]`, the same on every process, with one row on each rank."""
    sharding = NamedSharding(mesh, PartitionSpec(rank_axes(mesh)))
    return put(tree, jax.tree.map(lambda _: sharding, tree))


def put(tree: Any, shardings: Any) -> Any:
    """Places each array, equal on all processes, with its sharding, or parts by its `region`."""

    def put_one(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        region = getattr(x, "region", None)
        if region is not None:
            return jax.make_array_from_callback(x.shape, sharding, region)
        host = np.array(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put_one, tree, shardings)
