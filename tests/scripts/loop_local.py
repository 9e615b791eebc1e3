"""A custom loop with `tnt.local_steps`, and `fit` with what users add to it, in two groups; each
process writes what it found. `loop_local.py FOLDER`.

Run by the tests of local steps.
"""

import sys
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from reference_trainer import make_data

import tnt_jax as tnt

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
LOSS = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
folder, process = Path(sys.argv[1]), tnt.get_process_index()
x, y, _ = make_data(43)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def custom_loop():
    sync = tnt.LocalSteps(
        every=4, outer=OUTER, fragments=2, delay=1, compress="int8", groups="process"
    )
    from reference_trainer import Net

    net = Net()
    outer = tnt.local_steps(net.init(jax.random.key(4), x[:1], train=False)["params"], sync)

    @partial(jax.jit, donate_argnums=0)
    def step(params, x, y):
        def loss(params):
            logits = net.apply({"params": params}, x, train=False)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = outer.params
    for _ in range(2):
        for start in range(0, len(x), 9):
            rows = np.arange(start, min(start + 9, len(x)))
            own = np.array_split(rows, outer.num_groups)[outer.group]
            params = outer(step(params, x[own], y[own]), rows=len(own))
    params = outer.end(params)
    np.testing.assert_array_equal(flat(params), flat(outer.params))
    # Each of the two fragments is sent thrice: 163 parameters in eight bits, with the scales of
    # their four arrays; a message adds its length and its rows, as of parameters and of averages.
    assert outer.sent_bytes == 3 * (163 + 4 * 4) + 6 * (8 + 4 + 4)
    return {"loop": flat(outer.params)}


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.dense = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.drop(self.norm(x)))


def keras_model():
    sys.modules["tensorflow"] = None  # Keras would import it for a check when it describes a layer.
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )


def fits():
    x, y, _ = make_data(45)  # Five whole batches.
    sync = tnt.LocalSteps(every=3, outer=tnt.optimizers.SGD(1.0), groups="process")
    modules = {"nnx": Normed(nnx.Rngs(0)), "keras": keras_model(), "linen": nn.Dense(3)}
    found = {}
    for name, module in modules.items():
        model = tnt.Model(module, sync=sync)
        rate = tnt.schedules.ExponentialDecay(0.1, decay_steps=4, decay_rate=0.5)
        model.compile(tnt.optimizers.SGD(rate, momentum=0.9), loss=LOSS, metrics=["accuracy"])
        seen = []

        class Look(tnt.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None, seen=seen):
                seen.append((float(self.model.optimizer.learning_rate), logs["loss"]))

        history = model.fit(
            x,
            y,
            batch_size=9,
            epochs=3,
            verbose=0,
            validation_data=(x, y),
            callbacks=[Look(), tnt.callbacks.EarlyStopping("val_loss", restore_best_weights=True)],
        )
        logs = model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True)
        held = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
        found |= {
            f"{name} weights": held,
            f"{name} rates": np.array(seen),
            f"{name} loss": history.history["loss"],
            f"{name} evaluated": logs["loss"],
        }
        model.save_weights(folder / f"{name}.weights.h5")
        assert np.isfinite(held).all()
    return found


def stopped():
    """Trains until process 1 alone asks for the end."""
    model = tnt.Model(nn.Dense(1), sync=tnt.LocalSteps(every=5, delay=2, groups="process"))
    model.compile("sgd", loss="mse")

    class Stop(tnt.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3 and process == 1:
                self.model.stop_training = True

    x, y = np.ones((400, 3), np.float32), np.ones((400, 1), np.float32)
    model.fit(x, y, batch_size=4, epochs=9, callbacks=[Stop()], verbose=0)
    return {"stopped at": int(model.state.step), "stopped with": flat(model.get_weights())}


np.savez(folder / f"process{process}.npz", **custom_loop(), **fits(), **stopped())
