"""Process 1 differs in one thing after another. Each case must be the same error on all processes,
within seconds, after which they go on; `stops` are agreed instead.
"""

import time

import flax.linen as nn
import numpy as np
import optax

import tnt_jax as tnt
from tnt_jax import callbacks

is_other = tnt.get_process_index() == 1
x = np.arange(256, dtype=np.float32).reshape(64, 4) / 256
y = np.ascontiguousarray(x[:, :1])
batches = [(x[first : first + 8], y[first : first + 8]) for first in range(0, 64, 8)]
FOLDER = "/tmp/tnt_jax_disagree"  # Nothing is written there.
OPTIONS = {"batch_size": 8, "verbose": 0}


class Net(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(1)(nn.Dropout(self.dropout)(x, deterministic=not train))


def make(optimizer="sgd", loss="mse", metrics=None, module=None, on_nan=None, **options):
    model = tnt.Model(module or nn.Dense(1), **options)
    model.compile(optimizer, loss=loss, metrics=metrics, on_nan=on_nan)
    return model


def fit(model=None, x=x, y=y, **arguments):
    return (model or make()).fit(x, y, **OPTIONS | arguments)


def sgd(rate=0.1, **settings):
    return tnt.optimizers.SGD(rate, **settings)


def shuffled():
    order = np.random.default_rng(int(is_other)).permutation(8)
    return (batches[number] for number in order)


def trained(**choices):
    model = make(**choices)
    fit(model, epochs=1)
    return model


class ChangeRate(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if is_other and epoch == 1:
            self.model.optimizer.learning_rate = 0.5


class ChangeWeights(callbacks.OnMaster):
    class _Change(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                state = self.model.training_state
                arrays = {"params/kernel": np.zeros((4, 1), np.float32)}
                state.replace_variables(arrays | {"params/bias": np.zeros(1, np.float32)})

    def __init__(self):
        super().__init__(self._Change())


class Stop(callbacks.Callback):
    """Asks for the end after a batch; counts the steps until then."""

    def __init__(self, batch, epoch=0):
        super().__init__()
        self.at, self.epoch, self.num_steps = (epoch, batch), 0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        self.model.stop_training = (self.epoch, batch) == self.at


# Models that were trained apart hold weights of their own.
first, second = trained(seed=3), trained(seed=3, optimizer=sgd(0.3))
second.compile("sgd", loss="mse")
first.compile("sgd", loss="mse")
default, by_xla = trained(), trained(fusion_threshold="xla")
other_number = 1 + is_other

CASES = {
    "seed": (lambda: fit(make(seed=int(is_other))), "Model.seed: 0 on process 0, 1 on process 1"),
    "rate": (lambda: fit(make(sgd(0.1 * other_number))), "optimizer.learning_rate: 0.1 on process 0, 0.2 on"),
    "schedule": (
        lambda: fit(make(sgd(tnt.schedules.ExponentialDecay(0.1, 10 * other_number, 0.9)))),
        "optimizer.learning_rate.config.decay_steps: 10 on process 0, 20 on process 1",
    ),
    "momentum": (lambda: fit(make(sgd(momentum=0.9 * is_other))), "optimizer.momentum: 0.0 on process 0, 0.9 on"),
    "Optax": (lambda: fit(make(optax.sgd(0.1 * other_number))), "step_size: -0.1 on process 0, -0.2 on process 1"),
    "optimizer": (lambda: fit(make("adam" if is_other else "sgd")), "optimizer.name: sgd on process 0, adam on"),
    "loss": (lambda: fit(make(loss="mae" if is_other else "mse")), "loss: mse on process 0, mae on process 1"),
    "metrics": (lambda: fit(make(metrics=["mae"] * is_other)), "metrics: [] on process 0, ['mae'] on process 1"),
    "model": (lambda: fit(make(module=nn.Dense(1, use_bias=not is_other))), "model.use_bias: True on process 0, False"),
    "dropout": (lambda: fit(make(module=Net(0.5 * is_other))), "model.dropout: 0.0 on process 0, 0.5 on process 1"),
    "data": (lambda: fit(x=x + is_other), "contents of the arrays (checksum)"),
    "order of a generator": (lambda: make().fit(shuffled(), verbose=0), "The first batch of process 1 differs from"),
    "rows": (lambda: fit(x=x[is_other:], y=y[is_other:]), "number of examples: 64 on process 0, 63 on process 1"),
    "batch size": (lambda: fit(batch_size=8 * other_number), "batch_size: 8 on process 0, 16 on process 1"),
    "epochs": (lambda: fit(epochs=other_number), "epochs: 1 on process 0, 2 on process 1"),
    "first epoch": (lambda: fit(epochs=3, initial_epoch=int(is_other)), "initial_epoch: 0 on process 0, 1 on"),
    "steps": (lambda: fit(steps_per_epoch=4 * other_number), "steps_per_epoch: 4 on process 0, 8 on process 1"),
    "kind of data": (
        lambda: make().fit(batches if is_other else x, None if is_other else y, verbose=0),
        "kind of data: arrays on process 0, builtins.list on process 1",
    ),
    "shards": (
        lambda: make().fit(batches, verbose=0, tnt_distribute_dataset=not is_other),
        "tnt_distribute_dataset: True on process 0, False on process 1",
    ),
    "validation": (
        lambda: fit(validation_data=(x, y) if is_other else None),
        "kind of validation_data: None on process 0, arrays on process 1",
    ),
    "validation rows": (
        lambda: fit(validation_data=(x[is_other:], y[is_other:])),
        "number of examples of validation_data: 64 on process 0, 63 on process 1",
    ),
    "callbacks": (lambda: fit(callbacks=[Stop(99)] * is_other), "process 0 has [] and process 1 has [Stop]"),
    "backup's directory": (
        lambda: fit(callbacks=callbacks.BackupAndRestore(f"{FOLDER}/{other_number}")),
        f"BackupAndRestore.backup_dir: {FOLDER}/1 on process 0, {FOLDER}/2 on process 1",
    ),
    "backup's times": (
        lambda: fit(callbacks=callbacks.BackupAndRestore(FOLDER, save_freq=other_number)),
        "BackupAndRestore.save_freq: 1 on process 0, 2 on process 1",
    ),
    "patience": (
        lambda: fit(callbacks=callbacks.EarlyStopping("loss", patience=other_number)),
        "EarlyStopping.patience: 1 on process 0, 2 on process 1",
    ),
    "on_nan": (lambda: fit(make(on_nan="skip" if is_other else None)), "on_nan: None on process 0, skip on process 1"),
    "a file in the way": (
        lambda: fit(resume=f"{__file__}/runs"), f"Checkpoints cannot be written to {__file__}/runs/fit-"
    ),
    "a read-only file system": (
        lambda: fit(callbacks=callbacks.ModelCheckpoint("/proc/mine")), "Nothing can be saved in /proc/mine"
    ),
    "variables": (lambda: fit(first if is_other else make()), "variables of the model: not yet made on process 0"),
    "weights": (
        lambda: fit(first if is_other else second),
        "At the start of training, the ranks do not hold the same training state: params/bias, "
        "params/kernel on rank 1 (process 1) differ from rank 0 (process 0)",
    ),
    "evaluate": (lambda: by_xla.evaluate(x + is_other, y, verbose=0), "Model.evaluate needs the same data"),
    "predict": (lambda: by_xla.predict(x, batch_size=8 * other_number, verbose=0), "batch_size: 8 on process 0, 16"),
    "callbacks of evaluate": (
        lambda: by_xla.evaluate(x, y, verbose=0, callbacks=[Stop(99)] * is_other),
        "same callbacks to Model.evaluate, but process 0 has [] and process 1 has [Stop]",
    ),
    "callbacks of predict": (
        lambda: by_xla.predict(x, verbose=0, callbacks=[Stop(99)] * is_other),
        "same callbacks to Model.predict, but process 0 has [] and process 1 has [Stop]",
    ),
}  # fmt: skip
DRIFTS = {
    "rate set in training": (
        lambda: fit(by_xla, epochs=4, callbacks=[ChangeRate()]),
        "At the end of epoch 2, the ranks do not hold the same training state: "
        "opt_state/hyperparams/learning_rate on rank 1 (process 1) differ",
    ),
    "weights set in training": (lambda: fit(default, epochs=2, callbacks=[ChangeWeights()]), "At the end of epoch 1, the ranks"),
}  # fmt: skip
# Where processes ask for the end, and the steps of all: 4 programs may be under way on another
# process, and an epoch has 8 steps.
STOPS = {
    "all alike": (Stop(2), 3),
    "one": (Stop(2 if is_other else 99), 8),
    "the first alone": (Stop(99 if is_other else 0), 6),
    "one after the other": (Stop(3 if is_other else 0), 6),
    "the last step": (Stop(7 if is_other else 99), 8),
    "the second epoch": (Stop(0 if is_other else 99, epoch=1), 14),
}


def refuse(name, call, text):
    start = time.monotonic()
    try:
        call()
    except (ValueError, RuntimeError, OSError) as error:
        told, took_s = str(error), time.monotonic() - start
    else:
        told, took_s = "no error", 0.0
    texts = tnt.all_gather(np.frombuffer(told[:100].ljust(100).encode(), np.uint8))
    assert (texts == texts[0]).all(), (name, told)
    assert text in told, (name, told)
    assert took_s < 10, (name, took_s)
    print("refused", name, flush=True)


def stop(name, callback, num_steps):
    for model in default, by_xla:
        before, callback.num_steps = model.optimizer.iterations, 0
        fit(model, callbacks=[callback], epochs=3)
        own = np.array([callback.num_steps, model.optimizer.iterations - before])
        assert (tnt.all_gather(own) == num_steps).all(), (name, own)
    print("stopped", name, flush=True)


for name, (call, text) in CASES.items():
    refuse(name, call, text)
for name, (callback, num_steps) in STOPS.items():
    stop(name, callback, num_steps)
# Whatever was refused, equal processes train on.
assert len(fit(by_xla, epochs=2, callbacks=[Stop(99)], validation_data=(x, y)).epoch) == 2
for name, (call, text) in DRIFTS.items():
    refuse(name, call, text)
print(len(CASES | DRIFTS), "cases and", len(STOPS), "stops", flush=True)
