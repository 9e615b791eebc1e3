"""Runs of `train_local.py`, and the algorithm as a plain loop in one process."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from processes import SCRIPTS, launch
from reference_trainer import Net, make_data

RATE, OWN_PART = 0.1, 0.5


def run(num_processes, folder, recipes, *, num_devices=1, fails_with=(), **options):
    """Returns what each process wrote, by recipe; 0 processes run without the launcher.

    A run that must fail says all of `fails_with`, and its last recipe has no results.
    """
    for name in recipes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    words = json.dumps(recipes), folder, num_devices
    result = launch(num_processes, SCRIPTS / "train_local.py", *words, **options)
    assert (result.returncode == 0) == (not fails_with), result.stdout + result.stderr
    assert all(text in result.stderr for text in fails_with), result.stderr
    return {
        name: [dict(np.load(file)) for file in sorted((folder / name).glob("*.npz"))]
        for name in list(recipes)[: -1 if fails_with else None]
    }


def rounded(x, compress="int8"):
    """Returns an array as it comes out of eight, or four, bits for each element."""
    if compress == "float4":
        powers = np.max(np.abs(x)) * np.float32([0, *(2.0**power for power in range(-6, 1))])
        levels = np.concatenate([-powers, powers])
        return levels[np.argmin(np.abs(x[..., None] - levels), axis=-1)]
    scale = np.max(np.abs(x)) / np.float32(127)
    return np.round(x / scale).astype(np.int8).astype(np.float32) * scale if scale else x


def train_plainly(
    *,
    rows,
    size,
    num_groups,
    every,
    outer,
    fragments=None,
    delay=0,
    compress="none",
    epochs=2,
    bad_rows=(),
):
    """Trains `Net` by (Streaming) DiLoCo, group after group in one process, without the package.

    `fragments` are lists of the arrays that travel together, by their number. A group skips its
    steps on `bad_rows`. Returns the outer weights at the end, after an update of every fragment.
    """
    x, y, _ = make_data(rows)
    net = Net()
    params = net.init(jax.random.key(4), x[:1], train=False)["params"]
    flat, structure = jax.tree.flatten(params)
    shared = [np.asarray(leaf) for leaf in flat]
    fragments = fragments or [list(range(len(shared)))]
    groups = [[leaf.copy() for leaf in shared] for _ in range(num_groups)]
    residuals = [[np.zeros_like(leaf) for leaf in shared] for _ in range(num_groups)]
    seen = np.zeros((num_groups, len(fragments)))
    unsent = np.zeros(len(fragments), bool)
    opt_states = [outer.init([shared[i] for i in part]) for part in fragments]
    under_way = []

    @jax.jit
    def grads_of(leaves, x, y):
        def loss(leaves):
            logits = net.apply({"params": structure.unflatten(leaves)}, x, train=False)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        return jax.grad(loss)(leaves)

    def send(number, due):
        moves = []
        for group in range(num_groups):
            own = []
            for i in fragments[number]:
                move = shared[i] - groups[group][i]
                if compress != "none":
                    move = move + residuals[group][i]
                    residuals[group][i] = move - rounded(move, compress)
                    move = rounded(move, compress)
                own.append(move)
            moves.append(own)
        shares = seen[:, number] / max(seen[:, number].sum(), 1)
        seen[:, number] = unsent[number] = 0
        mean = [
            sum(np.float32(share) * move for share, move in zip(shares, column, strict=True))
            for column in zip(*moves, strict=True)
        ]
        under_way.append((due, number, mean))

    def receive():
        _, number, mean = under_way.pop(0)
        part = fragments[number]
        updates, opt_states[number] = outer.update(
            mean, opt_states[number], [shared[i] for i in part]
        )
        for i, update in zip(part, updates, strict=True):
            shared[i] = np.asarray(shared[i] + update)
            for group in groups:
                group[i] = OWN_PART * group[i] + (1 - OWN_PART) * shared[i] if delay else shared[i]

    step = 0
    for _ in range(epochs):
        for start in range(0, rows, size):
            batch = slice(start, min(start + size, rows))
            part = -(-(batch.stop - batch.start) // num_groups)
            step += 1
            unsent[:] = True
            for g, group in enumerate(groups):
                own = slice(start + g * part, min(start + (g + 1) * part, batch.stop))
                if any(own.start <= row < own.stop for row in bad_rows):
                    continue
                seen[g] += own.stop - own.start
                grads = grads_of(group, jnp.asarray(x[own]), jnp.asarray(y[own]))
                groups[g] = [
                    leaf - RATE * np.asarray(grad) for leaf, grad in zip(group, grads, strict=True)
                ]
            for number in range(len(fragments)):
                if (step - (number + 1) * every // len(fragments)) % every == 0:
                    send(number, step + delay)
            while under_way and under_way[0][0] <= step:
                receive()
    while under_way:
        receive()
    for number in range(len(fragments)):
        if unsent[number]:
            send(number, step)
            receive()
    return shared
