"""A plain training loop on one device, on Flax and Optax alone: the truth that distributed
training must equal.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Net(nn.Module):
    """Two layers with BatchNorm (synchronised over `axis_name`) and dropout, switched on by the
    arguments.
    """

    batch_norm: bool = False
    dropout: float = 0.0
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16)(x)
        if self.batch_norm:
            x = nn.BatchNorm(
                use_running_average=not train,
                momentum=0.9,
                axis_name=self.axis_name,
                use_fast_variance=False,
            )(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


def make_data(num_examples, *, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, 6)).astype(np.float32)
    y = rng.integers(0, 3, num_examples).astype(np.int32)
    return x, y, rng.uniform(0.2, 2.0, num_examples).astype(np.float32)


def train(net, optimizer, batches, *, epochs, seed=0, make_key=None):
    """Trains on lists of `(x, y, weight)`; returns the history of loss and accuracy, and the
    variables.
    """
    variables = jax.jit(partial(net.init, train=False))(jax.random.key(seed), batches[0][0][:1])
    params, stats = variables["params"], variables.get("batch_stats", {})
    opt_state = optimizer.init(params)

    def loss_of(params, stats, x, y, weight, key):
        rngs = None if key is None else {"dropout": key}
        logits, new = net.apply(
            {"params": params, "batch_stats": stats},
            x,
            train=True,
            rngs=rngs,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.sum(losses * weight) / len(y), (logits, new.get("batch_stats", {}))

    @jax.jit
    def update(params, stats, opt_state, step, x, y, weight):
        key = None if make_key is None else make_key(step, len(y))
        (loss, (logits, stats)), grads = jax.value_and_grad(loss_of, has_aux=True)(
            params, stats, x, y, weight, key
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, loss, logits

    history, step = {"loss": [], "accuracy": []}, 0
    for _ in range(epochs):
        loss_sum = correct = rows = 0
        for x, y, weight in batches:
            params, stats, opt_state, loss, logits = update(
                params, stats, opt_state, step, x, y, weight
            )
            step += 1
            loss_sum, rows = loss_sum + float(loss) * len(y), rows + len(y)
            correct += int(np.sum(np.asarray(logits).argmax(-1) == y))
        history["loss"].append(loss_sum / rows)
        history["accuracy"].append(correct / rows)
    return history, {"params": params, "batch_stats": stats}
