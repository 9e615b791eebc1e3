"""Models that compare the rows of a batch, and a plain training loop for them on one device, on
Flax and Optax alone: the truth that distributed training must equal.
"""

from functools import cache, partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import tnt_jax as tnt

TOLERANCE = 1e-5


def make_rows(num_examples):
    rng = np.random.default_rng(0)
    image, text = rng.normal(size=(2, num_examples, 6)).astype(np.float32)
    return {"image": image, "text": text[:, :4]}, rng.integers(0, 3, num_examples)


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


class Towers(nn.Module):
    """Two towers, as of CLIP (Radford et al. 2021, arXiv:2103.00020, figure 3)."""

    @nn.compact
    def __call__(self, image, text, train: bool = False):
        scale = self.param("scale", nn.initializers.constant(1.0), ())
        left, right = (unit(nn.Dense(8)(nn.tanh(nn.Dense(8)(x)))) for x in (image, text))
        return left * jnp.exp(scale), right


def clip(params, batch, rngs, apply):
    left, right = apply(params, batch.inputs)
    logits, own = left @ right.T, jnp.arange(len(left))
    losses = [optax.softmax_cross_entropy_with_integer_labels(x, own) for x in (logits, logits.T)]
    return (losses[0] + losses[1]) / 2


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, image, text, train: bool = False):
        return unit(nn.Dense(8)(nn.tanh(nn.Dense(8)(image))))


def simclr(params, batch, rngs, apply):
    """NT-Xent over two views of each row (Chen et al. 2020, arXiv:2002.05709, equation 1)."""
    image = batch.inputs["image"]
    views = [apply(params, {**batch.inputs, "image": x}) for x in (image, 0.8 * image + 0.1)]
    z, num_rows = jnp.concatenate(views), len(image)
    logits = z @ z.T / 0.5 - 1e9 * jnp.eye(2 * num_rows)
    others = (jnp.arange(2 * num_rows) + num_rows) % (2 * num_rows)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, others)
    return (losses[:num_rows] + losses[num_rows:]) / 2


class BatchMean(nn.Module):
    @nn.compact
    def __call__(self, image, text, train: bool = False):
        x = nn.tanh(nn.Dense(8)(image))
        return nn.Dense(3)(x - x.mean(0))


class BestOfBatch(nn.Module):
    """Passes on the half of the rows whose score is highest."""

    @nn.compact
    def __call__(self, image, text, train: bool = False):
        x = nn.tanh(nn.Dense(8)(image))
        scores = nn.sigmoid(nn.Dense(1)(x)[:, 0])
        least = jax.lax.top_k(scores, len(x) // 2 + 1)[0][-1]
        return nn.Dense(3)(x * (scores * (scores >= least))[:, None])


class Experts(nn.Module):
    """Experts of limited capacity (Fedus et al. 2021, arXiv:2101.03961, section 2.2)."""

    @nn.compact
    def __call__(self, image, text, train: bool = False):
        num_experts = 3
        gates = nn.softmax(nn.Dense(num_experts)(image))
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), num_experts)
        places = jnp.cumsum(chosen, 0) * chosen
        capacity = -(-len(image) // num_experts)
        weights = gates * chosen * (places <= capacity)
        kernels = self.param("experts", nn.initializers.normal(0.5), (num_experts, 6, 8))
        return nn.Dense(3)(nn.tanh(jnp.einsum("be,bi,eij->bj", weights, image, kernels)))


class OwnNorm(nn.Module):
    """A batch normalisation of the user's own, with moving statistics."""

    @nn.compact
    def __call__(self, image, text, train: bool = False):
        x = nn.Dense(8)(image)
        mean = self.variable("stats", "mean", lambda: jnp.zeros(8))
        var = self.variable("stats", "var", lambda: jnp.ones(8))
        if train and not self.is_initializing():
            now = x.mean(0), x.var(0)
            mean.value, var.value = (
                0.9 * old.value + 0.1 * new for old, new in zip((mean, var), now, strict=True)
            )
        else:
            now = mean.value, var.value
        return nn.Dense(3)((x - now[0]) / jnp.sqrt(now[1] + 1e-3))


# Module, and objective; None for cross-entropy of the outputs.
MODELS = {
    "clip": (Towers(), clip),
    "simclr": (Encoder(), simclr),
    "batch mean": (BatchMean(), None),
    "best of batch": (BestOfBatch(), None),
    "experts": (Experts(), None),
    "own norm": (OwnNorm(), None),
}


@cache
def fresh_variables(name):
    """Returns variables drawn by NumPy: the models' own initialisation is a program each."""
    rng = np.random.default_rng(0)
    variables = jax.eval_shape(MODELS[name][0].init, jax.random.key(0), **make_rows(1)[0])
    params = jax.tree.map(lambda x: rng.normal(0, 0.4, x.shape).astype("f4"), variables["params"])
    # Moving statistics, of which one is a variance.
    return jax.tree.map(lambda x: rng.uniform(0.1, 1, x.shape).astype("f4"), dict(variables)) | {
        "params": params
    }


def compiled(name, *, optimizer=None, model_options=None, **options):
    """Returns a compiled model, and the variables that it begins with."""
    module, objective = MODELS[name]
    variables = fresh_variables(name)
    model = tnt.Model(module, variables=variables, **(model_options or {}))
    loss = None if objective else tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or optax.sgd(0.1), loss, objective=objective, **options)
    return model, variables


def _loss_of(name, params, stats, x, y, *, train):
    """Returns the mean loss of a batch, and the model state after it."""
    module, objective = MODELS[name]
    state = dict(stats)

    def apply(params, inputs):
        outputs, new = module.apply(
            {"params": params, **state}, **inputs, train=train, mutable=list(state)
        )
        state.update(new)
        return outputs

    if objective is not None:
        return jnp.mean(objective(params, SimpleNamespace(inputs=x), {}, apply)), state
    losses = optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y)
    return jnp.mean(losses), state


@partial(jax.jit, static_argnames="name")
def _gradients(name, params, stats, x, y):
    loss_of = partial(_loss_of, name, train=True)
    return jax.value_and_grad(loss_of, has_aux=True)(params, stats, x, y)


@partial(jax.jit, static_argnames="name")
def _evaluated(name, params, stats, x, y):
    loss, _ = _loss_of(name, params, stats, x, y, train=False)
    return loss, MODELS[name][0].apply({"params": params, **stats}, **x)


def _batches(x, y, size):
    return [
        (jax.tree.map(lambda a, i=i: a[i : i + size], x), y[i : i + size])
        for i in range(0, len(y), size)
    ]


@cache
def plain_loop(name, num_examples, size, **options):
    """Returns what `plain_steps` does for rows in order."""
    return plain_steps(name, _batches(*make_rows(num_examples), size), **options)


def plain_steps(name, batches, *, epochs=2, accumulated=1, momentum=0.0):
    """Returns the loss of each epoch, and the variables, after training by plain gradient descent.

    Args:
        accumulated: Steps whose mean gradient makes one update.
    """
    variables = fresh_variables(name)
    params, stats = variables["params"], {k: v for k, v in variables.items() if k != "params"}
    moved, losses, pending = jax.tree.map(np.zeros_like, params), [], []
    for _ in range(epochs):
        total = 0.0
        for batch in batches:
            # Updates in NumPy: outside of `jit`, each operation on each shape is a program.
            (loss, stats), grads = jax.device_get(_gradients(name, params, stats, *batch))
            total += loss * len(batch[1])
            pending.append(grads)
            if len(pending) == accumulated:
                mean = jax.tree.map(lambda *g: sum(g) / accumulated, *pending)
                moved = jax.tree.map(lambda m, g: momentum * m + g, moved, mean)
                params, pending = jax.tree.map(lambda p, m: p - 0.1 * m, params, moved), []
        losses.append(total / sum(len(targets) for _, targets in batches))
    return losses, {"params": params, **stats}


def plain_evaluation(name, variables, x, y, size):
    """Returns the loss over batches of `size` rows, and the outputs of the model for them."""
    params, stats = variables["params"], {k: v for k, v in variables.items() if k != "params"}
    losses, outputs = zip(
        *(_evaluated(name, params, stats, *batch) for batch in _batches(x, y, size)), strict=True
    )
    sizes = [min(size, len(y) - first) for first in range(0, len(y), size)]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
    return np.average(losses, weights=sizes), joined


def shard_of(process, num_processes):
    """Returns the batches of a process that brings rows of its own; shards differ in length."""
    x, y = make_rows(31)
    first, last = (31 * (number**2) // num_processes**2 for number in (process, process + 1))
    return _batches(jax.tree.map(lambda a: a[first:last], x), y[first:last], 8)


def joined_shards(num_processes):
    """Returns the global batches of all shards together."""
    shards = [shard_of(process, num_processes) for process in range(num_processes)]
    steps = [
        [shard[step] for shard in shards if step < len(shard)]
        for step in range(max(map(len, shards)))
    ]
    return [jax.tree.map(lambda *parts: np.concatenate(parts), *step) for step in steps]
