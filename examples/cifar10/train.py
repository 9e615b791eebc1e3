"""Trains what a YAML configuration says: data and model by name, the rate scaled with the ranks,
warmed up and dropped by epochs.

    python train.py configs/hello.yaml
    tnt-jax --hostfile hosts -- train.py configs/cifar10_resnet.yaml -d training.n_epochs=1

The walk-through follows NERSC's course "Deep Learning at Scale"; `training.batch_size` is that of
one rank, as there.
"""

import argparse
import dataclasses
import os
import time
from functools import partial
from pathlib import Path

# TensorFlow only reads the data here: quietly, and with the same kernels on every processor.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import configuration
import console
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import tnt_jax as tnt


class Linear(nn.Module):
    """One dense layer on all pixels: the baseline that a network has to beat."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, images, *, train):
        return nn.Dense(self.num_classes, name="classifier")(images.reshape(len(images), -1))


MODELS = {
    "cnn": tnt.models.CNN,
    "linear": Linear,
    "resnet_small": tnt.models.ResNetSmall,
    **{
        f"resnet{depth}": getattr(tnt.models, f"resnet{depth}")
        for depth in (18, 20, 32, 34, 44, 50, 56, 101, 110, 152)
    },
    "resnet50_v1": tnt.models.resnet50_v1,
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
OPTIMIZERS = {
    "adam": tnt.optimizers.Adam,
    "adamw": tnt.optimizers.AdamW,
    "rmsprop": tnt.optimizers.RMSprop,
    "sgd": tnt.optimizers.SGD,
}


def make_module(config):
    """Returns the module that the section `model` names; its other keys are the attributes of the
    module.
    """
    builder = configuration.choose(config["name"], MODELS, "model")
    fixed = builder.keywords if isinstance(builder, partial) else {}
    cls = builder.func if isinstance(builder, partial) else builder
    known = {field.name for field in dataclasses.fields(cls)} - {"parent", "name", *fixed}
    settings = {key: value for key, value in config.items() if key != "name"}
    configuration.check_keys(settings, known, f"the model {config['name']!r}")
    if "dtype" in settings:
        settings["dtype"] = configuration.choose(settings["dtype"], DTYPES, "dtype")
    return builder(**settings)


class CourseSchedule:
    """A rate by epochs: linear from `base` to `peak` in the first epochs, then `peak` times the
    multiplier of the epoch.

    Args:
        base: Rate of one rank.
        peak: Rate scaled to all ranks.
        steps_per_epoch: Updates of an epoch.
        warmup_epochs: Length of the linear part.
        parts: Entries with `multiplier`, `start_epoch` and, but for the last, `end_epoch`;
            elsewhere the multiplier is 1.
    """

    def __init__(self, base, peak, *, steps_per_epoch, warmup_epochs=0, parts=()):
        self.base, self.peak, self.steps_per_epoch, self.warmup_epochs = (
            base,
            peak,
            steps_per_epoch,
            warmup_epochs,
        )
        self.parts = tuple(
            (part["start_epoch"], part.get("end_epoch", np.inf), part["multiplier"])
            for part in parts
        )

    def __call__(self, step):
        epoch = jnp.asarray(step, jnp.float32) / self.steps_per_epoch
        rate = jnp.full_like(epoch, self.peak)
        for start, end, multiplier in self.parts:
            rate = jnp.where((epoch >= start) & (epoch < end), self.peak * multiplier, rate)
        warm = self.base + (self.peak - self.base) * epoch / max(self.warmup_epochs, 1e-9)
        return jnp.where(epoch < self.warmup_epochs, warm, rate)


def scaled_rate(rate, scaling, num_ranks):
    """Returns the rate for `num_ranks` ranks: times their number, times its root, or unchanged."""
    return rate * {"linear": num_ranks, "sqrt": num_ranks**0.5, "none": 1}[scaling]


def make_optimizer(config, training, *, steps_per_epoch):
    """Returns the optimizer of the section `optimizer` with the schedule of the section
    `training`.
    """
    settings = {
        key: value for key, value in config.items() if key not in ("name", "lr", "lr_scaling")
    }
    schedule = CourseSchedule(
        config["lr"],
        scaled_rate(config["lr"], config.get("lr_scaling", "linear"), tnt.get_size()),
        steps_per_epoch=steps_per_epoch,
        warmup_epochs=training.get("lr_warmup_epochs", 0),
        parts=training.get("lr_schedule", ()),
    )
    return configuration.choose(config["name"].lower(), OPTIMIZERS, "optimizer")(
        learning_rate=schedule, **settings
    )


def make_loss(name, label_smoothing):
    """Returns the loss for integer labels and logits."""
    if name == "binary_crossentropy":
        return tnt.losses.BinaryCrossentropy(from_logits=True, label_smoothing=label_smoothing)
    configuration.choose(
        name,
        {
            "categorical_crossentropy": 0,
            "sparse_categorical_crossentropy": 0,
            "binary_crossentropy": 0,
        },
        "loss",
    )
    if not label_smoothing:
        return tnt.losses.SparseCategoricalCrossentropy(from_logits=True)

    def smoothed(labels, logits):
        one_hot = jnp.eye(logits.shape[-1])[labels.astype(jnp.int32).reshape(-1)]
        return tnt.losses.categorical_crossentropy(
            one_hot, logits, from_logits=True, label_smoothing=label_smoothing
        )

    return smoothed


def make_metrics(names, loss):
    """Returns the metrics by name; they read logits."""
    binary = tnt.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
    table = {
        "accuracy": binary
        if loss == "binary_crossentropy"
        else tnt.metrics.SparseCategoricalAccuracy(name="accuracy"),
        "top_k_categorical_accuracy": tnt.metrics.SparseTopKCategoricalAccuracy(
            k=5, name="top_k_categorical_accuracy"
        ),
    }
    return [configuration.choose(name, table, "metric") for name in names]


class EpochTimes(tnt.callbacks.Callback):
    """Adds the seconds of each epoch, validation included, to the logs as `time`."""

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        logs["time"] = time.perf_counter() - self._start


def train(config, *, verbose):
    """Trains and returns the history by name, the trained variables as host arrays, and the
    module.
    """
    seed, training = config.get("seed", 0), config["training"]
    batch_size = training["batch_size"] * tnt.get_size()
    module = make_module(config["model"])
    # Imported here, because TensorFlow takes seconds, which --show-config and mistakes need not
    # wait for.
    import image_data

    data = image_data.make(config["data"], batch_size=batch_size, seed=seed)
    steps_per_epoch = -(-data.num_train // batch_size)
    model = tnt.Model(module, seed=seed)
    model.compile(
        optimizer=make_optimizer(config["optimizer"], training, steps_per_epoch=steps_per_epoch),
        loss=make_loss(training["loss"], training.get("label_smoothing", 0.0)),
        metrics=make_metrics(training.get("metrics", ()), training["loss"]),
    )
    callbacks = [EpochTimes()]
    if config.get("output_dir"):
        checkpoint = Path(config["output_dir"]) / "checkpoints" / "checkpoint-{epoch}"
        callbacks.append(tnt.callbacks.ModelCheckpoint(checkpoint, save_weights_only=True))
    if verbose:
        model.build(next(iter(data.valid.take(1)))[0].numpy())
        model.summary()
    history = model.fit(
        data.train,
        epochs=training["n_epochs"],
        validation_data=data.valid,
        callbacks=callbacks,
        verbose=2,
    )
    return history.history, jax.device_get(model.variables), module


def report(history, output_dir):
    """Prints the best results and keeps the history, on the master."""
    if not tnt.is_master_rank():
        return
    for name in ("val_accuracy", "val_top_k_categorical_accuracy"):
        if name in history:
            print(f"Best {name}: {max(history[name]):.4f}")
    print(f"Mean seconds per epoch: {np.mean(history['time']):.2f} on {tnt.get_size()} rank(s)")
    if output_dir:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        np.savez(Path(output_dir) / "history.npz", n_ranks=tnt.get_size(), **history)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "config",
        nargs="?",
        default=Path(__file__).parent / "configs" / "hello.yaml",
        help="YAML file (hello.yaml)",
    )
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="section.key=value",
        help="values that replace those of the file",
    )
    parser.add_argument(
        "-d",
        "--distributed",
        action="store_true",
        help="join the other processes at once, and print the rank. Processes that tnt-jax has "
        "started train together with and without it; those that srun or mpirun has, too",
    )
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="after training, open a Python console on the master",
    )
    parser.add_argument("--optimizer", help="name, lr, lr_scaling and lr_warmup_epochs as k=v,k=v")
    parser.add_argument(
        "--batch_size",
        type=int,
        help="replaces training.batch_size: examples of one rank in a step",
    )
    parser.add_argument("--n_epochs", type=int, help="replaces training.n_epochs")
    parser.add_argument("--dropout", type=float, help="replaces model.dropout")
    parser.add_argument(
        "--show-config", action="store_true", help="print the configuration that results, and stop"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print the table of the model's weights"
    )
    return parser.parse_intermixed_args()


def changes_of(args):
    """Returns all changes as texts `section.key=value`; those with a flag of their own come
    last.
    """
    changes = list(args.changes)
    for pair in filter(None, (args.optimizer or "").split(",")):
        section = "training" if pair.startswith("lr_warmup_epochs=") else "optimizer"
        changes.append(f"{section}.{pair}")
    flags = {
        "training.batch_size": args.batch_size,
        "training.n_epochs": args.n_epochs,
        "model.dropout": args.dropout,
    }
    return changes + [f"{key}={value}" for key, value in flags.items() if value is not None]


def main():
    args = parse_args()
    try:
        config = configuration.load(args.config, changes_of(args))
        if args.show_config:
            print(configuration.show(config), end="")
            return
        if "intra_threads" in config.get("device", {}):
            # Threads of XLA's CPU kernels; read when JAX starts.
            os.environ.setdefault("PJRT_NPROC", str(config["device"]["intra_threads"]))
        if args.distributed:
            tnt.init()
            print(f"Initialized rank {tnt.get_rank()} out of {tnt.get_size()}", flush=True)
        history, variables, module = train(config, verbose=args.verbose)
        report(history, config.get("output_dir"))
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"train.py: {error}") from error
    if args.interactive:
        # Not the model, whose methods wait for all processes: module.apply runs on this one alone.
        console.interact(
            {"config": config, "history": history, "variables": variables, "module": module}
        )


if __name__ == "__main__":
    main()
