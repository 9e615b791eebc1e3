"""Mean and variance of the real rows of a batch (Ioffe and Szegedy 2015, arXiv:1502.03167)."""

import jax
import jax.numpy as jnp


def real_row_moments(
    x: jax.Array, mask: jax.Array, *, feature_dim: int, axis_name: str | tuple[str, ...] | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and biased variance `[features]` of the rows of `x` whose mask is 1.

    The dtype is at least float32. They are those of the ranks on the named axes, or of this rank.
    """
    features = feature_dim % x.ndim
    others = tuple(dim for dim in range(x.ndim) if dim != features)
    # A rank of its own without real rows uses its padding: its share of every average is 0.
    weight = mask if axis_name is not None else jnp.where(jnp.sum(mask) > 0, mask, 1.0)
    weight = weight.reshape(-1, *(1,) * (x.ndim - 1))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    per_row = x.size // (x.shape[0] * x.shape[features])

    def total(values: jax.Array) -> jax.Array:
        return values if axis_name is None else jax.lax.psum(values, axis_name)

    count = total(jnp.sum(weight) * per_row)
    mean = total(jnp.sum(wide * weight, others)) / count
    centred = wide - jnp.expand_dims(mean, others)
    return mean, total(jnp.sum(jnp.square(jnp.abs(centred)) * weight, others)) / count


def normalize(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    *,
    scale: jax.Array | None,
    bias: jax.Array | None,
    feature_dim: int,
    epsilon: float,
) -> jax.Array:
    """Returns `(x - mean) / sqrt(var + epsilon) * scale + bias`, at least float32."""
    shape = [1] * x.ndim
    shape[feature_dim] = -1
    gain = jax.lax.rsqrt(var + epsilon)
    gain = gain if scale is None else gain * scale
    y = (x.astype(mean.dtype) - mean.reshape(shape)) * gain.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)
