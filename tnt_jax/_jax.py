"""Every JAX call whose name or signature differs between the supported versions, or is not public.

The rest of the package, but for `host_call.py`, calls JAX through its documented API and these few functions.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

DATA_AXIS = "data"


def make_data_mesh(devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of one axis, `data`, over `devices` in the given order."""
    # jax.make_mesh makes Explicit axes by default and reorders devices; ranks must keep their order.
    return Mesh(np.asarray(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def shard_map(function: Callable, *, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Maps `function` over the ranks of `mesh`, with the check of replicated outputs on.

    One rank alone is not checked: nothing can differ, and `psum` needs no collective to make that known.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=mesh.size > 1)


def all_gather_invariant(x: jax.Array) -> jax.Array:
    """Returns the parts of all ranks one behind the other, marked as the same on every rank, inside `shard_map`."""
    from jax._src.lax import parallel  # Older versions have no public way to it: their all_gather marks its result as varying.

    if hasattr(parallel, "all_gather_invariant"):
        return parallel.all_gather_invariant(x, DATA_AXIS, axis=0, tiled=True)
    return jax.lax.all_gather(x, DATA_AXIS, axis=0, tiled=True, to="invarying")


def local_parts(x: jax.Array) -> Sequence[jax.Array]:
    """Returns what each device of this process, in the order of the mesh, holds of `x`, as arrays of one device each."""
    if _PARTS in vars(x):
        return vars(x)[_PARTS]
    # The public addressable_shards makes an object with an index for each device, which takes longer than the step of a small model.
    return list(x._arrays)  # type: ignore[attr-defined]


def from_local_parts(parts: Sequence[jax.Array], shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Returns the global array of `shape` of which each device of this process, in the order of the mesh, holds a part."""
    kind = (shape, parts[0].dtype, sharding)
    if kind not in _avals:
        _avals[kind] = jax.make_array_from_single_device_arrays(shape, sharding, list(parts)).aval
    # The public function looks at every part again, which takes longer than to start the programs of a small model.
    whole = type(parts[0])(_avals[kind], sharding, list(parts), committed=True, _skip_checks=True)  # type: ignore[call-arg]
    # To take it apart again takes as long.
    setattr(whole, _PARTS, parts)
    return whole


_avals: dict[Any, Any] = {}
_PARTS = "_tnt_jax_parts"


def check_local(function: Callable, *args: Any, advice: str) -> None:
    """Raises a `ValueError` that ends with `advice` if `function` communicates over the data axis, inside `shard_map`."""
    primitive = _communication(jax.make_jaxpr(function)(*args).jaxpr)
    if primitive is not None:
        raise ValueError(f"The model communicates over the axis {DATA_AXIS!r} ({primitive}). {advice}")


def _communication(jaxpr: Any) -> str | None:
    for equation in _equations(jaxpr):
        names = (equation.params.get("axes", ()), equation.params.get("axis_name", ()))
        is_local = equation.primitive.name in ("pvary", "pcast", "axis_index")
        if not is_local and any(name == DATA_AXIS or (isinstance(name, tuple) and DATA_AXIS in name) for name in names):
            return equation.primitive.name
    return None


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def convolves(jitted: Any, *args: Any) -> bool:
    """Tells whether a jitted function convolves somewhere; a call of it with such arguments is not traced again."""
    return any(equation.primitive.name == "conv_general_dilated" for equation in _equations(jitted.trace(*args).jaxpr.jaxpr))


def convolution_options(mesh: Mesh) -> dict[str, Any]:
    """Returns the compiler options by which programs convolve faster on the devices of `mesh`; results differ by rounding."""
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    # YNNPACK's convolutions keep hardly more than one core busy; on one core they are the faster ones.
    has_more_cores = mesh.devices.flat[0].platform == "cpu" and _num_cores() > len(devices)
    return _without_ynn_convolutions() if has_more_cores else {}


def _num_cores() -> int:
    """Returns the processor cores that this process may use; the launcher writes its share to `OMP_NUM_THREADS`."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = os.environ.get("OMP_NUM_THREADS", "")
    return min(allowed, int(share)) if share.isdigit() else allowed


@lru_cache
def _without_ynn_convolutions() -> dict[str, Any]:
    # XLA hands wide convolutions on CPUs to YNNPACK, which is slower there than Eigen (benchmarks/convolutions.py). The option
    # names the kinds of operations that are left to it: the default without convolutions.
    kinds = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    options: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": kinds}
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(jax.local_devices(backend="cpu")[0]))
    try:
        jax.jit(lambda x: x).lower(number).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        # An experimental option goes when its time has come.
        if "xla_cpu_experimental_ynn_fusion_type" not in str(error):
            raise
        return {}
    return options


def unjitted(jitted: Any) -> Callable:
    """Returns the function behind `jax.jit`: a program with compiler options cannot be called within another."""
    return jitted.__wrapped__


def deterministic_options(mesh: Mesh) -> dict[str, Any]:
    """Returns the compiler options by which a program gives the same bits in every run on the devices of `mesh`."""
    # It implies xla_gpu_exclude_nondeterministic_ops, and chooses kernels by rule instead of by measuring them.
    return {"xla_gpu_deterministic_ops": True} if mesh.devices.flat[0].platform in ("gpu", "cuda") else {}


def is_varying(x: jax.Array) -> bool:
    """Tells whether `x` may differ between ranks inside `shard_map`."""
    aval = jax.typeof(x)
    # JAX versions differ in where the set of varying axes stands: in the manual axis type, or directly in `vma`.
    return DATA_AXIS in (aval.mat.varying if hasattr(aval, "mat") else aval.vma)


def make_varying(tree: Any) -> Any:
    """Marks every array of `tree` as different on each rank, so that its gradient stays local.

    Without it, `shard_map` sums gradients of replicated arrays itself, and a sum of ours makes them `num_ranks` times too large.
    """

    def vary(x: jax.Array) -> jax.Array:
        return x if is_varying(x) else jax.lax.pcast(x, DATA_AXIS, to="varying")

    return jax.tree.map(vary, tree)


def zeros_like(tree: Any) -> Any:
    """Returns zeros in the place of arrays, varying where these do."""
    return jax.tree.map(lambda x: make_varying(jnp.zeros_like(x)) if is_varying(x) else jnp.zeros_like(x), tree)


def backends_are_initialized() -> bool:
    """Tells whether JAX has already opened its devices, after which no job can be joined."""
    from jax._src import xla_bridge  # No public question exists.

    return xla_bridge.backends_are_initialized()


def is_distributed() -> bool:
    """Tells whether `jax.distributed.initialize` has run in this process."""
    return jax.distributed.is_initialized()


def coordination_client() -> Any:
    """Returns the client of the job's coordination service: its key/value store and its barriers need no device."""
    from jax._src import distributed  # The client has no public name.

    client = distributed.global_state.client
    assert client is not None, "The coordination service exists after jax.distributed.initialize only."
    return client


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Places host arrays on every device of `mesh`; each process must pass the same values."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(place(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        # A copy, because buffers of the training state are donated and the caller keeps its own.
        host = np.array(x)
        return jax.make_array_from_process_local_data(sharding, host, host.shape)

    return jax.tree.map(place, tree)


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Places arrays `[ranks, ...]`, one row on each rank; of host arrays each process must pass the same values."""
    sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    return place(tree, jax.tree.map(lambda _: sharding, tree))


def place(tree: Any, shardings: Any) -> Any:
    """Places arrays each with its own sharding; of host arrays each process must pass the same values."""

    def place_one(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        host = np.array(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place_one, tree, shardings)
