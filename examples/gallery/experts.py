"""A mixture of experts, which lie on different devices of a mesh.

    tnt-jax -n 2 -- examples/gallery/experts.py

Each row goes to one of eight experts of limited capacity (Fedus et al. 2021, arXiv:2101.03961,
section 2.2), whose weights are sharded over the axis `tensor`. Which rows fit depends on the whole
global batch, so the result is that of one device.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from digits_data import load

import tnt_jax as tnt

NUM_EXPERTS = 8


class Experts(nn.Module):
    """Routes each row to its expert; rows beyond the capacity pass by. `[batch, width]`."""

    hidden: int = 64
    capacity_factor: float = 1.5

    @nn.compact
    def __call__(self, x):
        rows, width = x.shape
        gates = nn.softmax(nn.Dense(NUM_EXPERTS, name="router")(x))
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), NUM_EXPERTS)
        # The share of rows of an expert times its mean gate is least if all get as many.
        balance = NUM_EXPERTS * jnp.sum(chosen.mean(0) * gates.mean(0))
        self.sow("losses", "balance", 0.01 * balance)
        capacity = int(self.capacity_factor * rows / NUM_EXPERTS) + 1
        places = (jnp.cumsum(chosen, axis=0) * chosen - 1).astype(jnp.int32)
        taken = jax.nn.one_hot(places, capacity)  # [rows, experts, capacity]
        init = nn.initializers.lecun_normal(batch_axis=0)
        first = self.param("first", init, (NUM_EXPERTS, width, self.hidden))
        second = self.param("second", init, (NUM_EXPERTS, self.hidden, width))
        queues = jnp.einsum("bec,bw->ecw", taken, x)
        outputs = jnp.einsum(
            "ech,ehw->ecw", nn.relu(jnp.einsum("ecw,ewh->ech", queues, first)), second
        )
        return x + jnp.einsum("bec,be,ecw->bw", taken, gates, outputs)


class Net(nn.Module):
    """Logits `[batch, 10]`."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Dense(32)(images.reshape(len(images), -1)))
        return nn.Dense(10)(nn.LayerNorm()(Experts()(x)))


def main(epochs=15):
    """Trains, and returns the accuracy on the test images."""
    train, test = load()
    tnt.init()
    parts = int(np.gcd(NUM_EXPERTS, tnt.get_size()))
    rules = [("*/first", ("tensor", None, None)), ("*/second", ("tensor", None, None))]
    model = tnt.Model(Net(), mesh={"data": -1, "tensor": parts}, sharding_rules=rules)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    model.fit(*train, batch_size=64, epochs=epochs, verbose=2)
    accuracy = model.evaluate(*test, batch_size=64, verbose=0)[1]
    if tnt.is_master_rank():
        print(f"experts in {parts} part(s), test accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
