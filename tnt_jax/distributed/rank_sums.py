"""Sums over the ranks in other forms than the compiler's: in 16 bits, and host by host."""

import jax
import jax.numpy as jnp

from tnt_jax import _jax


def sum_in_bfloat16(
    values: jax.Array, axis_name: str = _jax.DATA_AXIS
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum `[n]` over the ranks and this rank's rounding errors.

    Each rank adds up and rounds one shard of the sum.
    """
    num_ranks, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    parts = _pad(values, num_ranks).reshape(num_ranks, -1)
    sent = parts.astype(jnp.bfloat16)
    received = _from_bits(jax.lax.all_to_all(_bits(sent), axis_name, 0, 0, tiled=True))
    own = jnp.sum(received.astype(jnp.float32), axis=0)
    rounded = own.astype(jnp.bfloat16)
    gathered = _from_bits(_jax.all_gather_invariant(_bits(rounded), axis_name))
    # Only this rank can correct the error of the shard that it rounded for all.
    rest = (parts - sent.astype(jnp.float32)).at[rank].add(own - rounded.astype(jnp.float32))
    return gathered[: values.size].astype(jnp.float32), rest.reshape(-1)[: values.size]


def sum_by_hosts(values: jax.Array, ranks_per_host: int) -> jax.Array:
    """Returns the sum `[n]` over the ranks: added within hosts, then between hosts, then gathered.

    A host sends each sum once.
    """
    num_ranks = jax.lax.axis_size(_jax.DATA_AXIS)
    num_hosts = num_ranks // ranks_per_host
    hosts = [
        [host * ranks_per_host + local for local in range(ranks_per_host)]
        for host in range(num_hosts)
    ]
    columns = [
        [host * ranks_per_host + local for host in range(num_hosts)]
        for local in range(ranks_per_host)
    ]
    part = _pad(values, num_ranks)
    for groups in (hosts, columns):
        part = jax.lax.psum_scatter(part, _jax.DATA_AXIS, axis_index_groups=groups, tiled=True)
    # Rank (host, local) holds part `host` of part `local`.
    gathered = _jax.all_gather_invariant(part).reshape(num_hosts, ranks_per_host, -1)
    return jnp.swapaxes(gathered, 0, 1).reshape(-1)[: values.size]


def _pad(values: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(values, (0, -values.size % multiple))


def _bits(x: jax.Array) -> jax.Array:
    # Sent as integers: a CPU would widen bfloat16 to float32 and send that.
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _from_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16)
