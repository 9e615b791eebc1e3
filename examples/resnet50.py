"""Trains a residual network on ImageNet, with the recipe of Goyal et al.

2017 (arXiv:1706.02677) by default.

    tnt-jax --hostfile hosts --devices-per-node 4 -- examples/resnet50.py --data_dir=imagenet \
        --batch_size=512 --train_epochs=90 --epochs_between_evals=10

`--data_dir` holds TFRecord files (`train-00000-of-01024`, `validation-00000-of-00128`), or the
folders `train` and `validation` (or `val`) with a folder of JPEG files for each class, or data
prepared by TensorFlow Datasets. `--synthetic_data` needs none of them.
"""

import argparse
import os
import time
from pathlib import Path

# TensorFlow only reads the data here: quietly, and with the same kernels on every processor.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import jax.numpy as jnp
import numpy as np
from learning_rates import WarmupExponential, WarmupSteps

import tnt_jax as tnt

MODELS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet50_v1")


def find_records(args):
    """Returns datasets of records for training and validation, and the number of training
    images.
    """
    folder = Path(args.data_dir)
    valid = next(
        (folder / name for name in ("validation", "val") if (folder / name).is_dir()), None
    )
    if any(folder.glob("train-*-of-*")):
        files, offset = str(folder / "{}-*-of-*"), args.label_offset
        train = tnt.data.image_records(
            files.format("train"), label_offset=offset, shuffle_files=True, seed=args.shuffle_seed
        )
        return (
            train,
            tnt.data.image_records(files.format("validation"), label_offset=offset),
            args.train_num_samples,
        )
    if (folder / "train").is_dir() and valid is not None:
        train = tnt.data.image_folder(folder / "train")
        classes = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
        return train, tnt.data.image_folder(valid, classes=classes), int(train.cardinality())
    if (folder / args.tfds_name).is_dir():
        return tfds_records(args)
    raise SystemExit(
        f"{folder} holds no images: looked for train-*-of-* (TFRecords), for the folders train "
        f"and validation or val with a folder for "
        f"each class, and for {args.tfds_name} as prepared by TensorFlow Datasets. "
        f"--synthetic_data needs no data."
    )


def tfds_records(args):
    """Returns the records of a set of TensorFlow Datasets, whose JPEG files are left undecoded."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    builder = tfds.builder(args.tfds_name, data_dir=args.data_dir)

    def records(split):
        read = tfds.ReadConfig(interleave_cycle_length=8, skip_prefetch=True, try_autocache=False)
        examples = builder.as_dataset(
            split=split, decoders={"image": tfds.decode.SkipDecoding()}, read_config=read
        )
        name = lambda e: e.get("file_name", tf.constant(f"{args.tfds_name}/{split}"))  # noqa: E731
        return examples.map(
            lambda e: {"name": name(e), "jpeg": e["image"], "label": tf.cast(e["label"], tf.int32)}
        )

    return records("train"), records("validation"), builder.info.splits["train"].num_examples


class SyntheticImages:
    """Images of random numbers and labels, which need no decoding."""

    def __init__(self, num_examples, size, num_classes):
        shape = (min(64, num_examples), size, size, 3)
        self._patterns = np.random.default_rng(42).standard_normal(shape, np.float32)
        self._num_examples, self._num_classes = num_examples, num_classes

    def __len__(self):
        return self._num_examples

    def __getitem__(self, index):
        return self._patterns[index % len(self._patterns)], np.int32(index % self._num_classes)


def make_data(args):
    """Returns training and validation data, and the number of training images."""
    if args.synthetic_data:

        def batches(size):
            images = SyntheticImages(size, args.image_size, args.num_classes)
            return tnt.data.RandomAccess(
                images, batch_size=args.batch_size, drop_remainder=args.drop_remainder
            )

        return (
            batches(args.train_num_samples),
            batches(args.val_num_samples),
            args.train_num_samples,
        )
    train, valid, num_train = find_records(args)
    form = tnt.data.ImageFormat(size=args.image_size, scaling=args.preprocessing)
    return (
        tnt.data.training_images(
            train.take(args.train_num_samples),
            batch_size=args.batch_size,
            image_format=form,
            seed=args.shuffle_seed,
            drop_remainder=args.drop_remainder,
        ),
        tnt.data.evaluation_images(
            valid.take(args.val_num_samples), batch_size=args.batch_size, image_format=form
        ),
        min(num_train, args.train_num_samples),
    )


def make_schedule(args, num_train):
    """Returns the rate by updates: scaled with the global batch, warmed up over the first
    epochs.
    """
    steps = (
        num_train // args.batch_size if args.drop_remainder else -(-num_train // args.batch_size)
    )
    peak = args.base_learning_rate * args.batch_size / 256
    if args.schedule == "exponential":
        return WarmupExponential(peak, steps_per_epoch=steps, warmup_epochs=args.warmup_epochs)
    # The drops of a 90-epoch run, moved in proportion for a shorter or longer one.
    boundaries = [epoch * args.train_epochs / 90 for epoch in (30, 60, 80)]
    return WarmupSteps(
        peak, steps_per_epoch=steps, warmup_epochs=args.warmup_epochs, boundaries=boundaries
    )


def make_loss(label_smoothing):
    """Returns the loss for integer labels and logits."""
    if not label_smoothing:
        return tnt.losses.SparseCategoricalCrossentropy(from_logits=True)

    def smoothed(labels, logits):
        one_hot = jnp.eye(logits.shape[-1])[labels.astype(jnp.int32).reshape(-1)]
        return tnt.losses.categorical_crossentropy(
            one_hot, logits, from_logits=True, label_smoothing=label_smoothing
        )

    return smoothed


def make_model(args, num_train):
    """Returns the compiled model."""
    module = getattr(tnt.models, args.model)(
        num_classes=args.num_classes,
        dtype=jnp.bfloat16 if args.bfloat16 else jnp.float32,
        bn_axis_name="data" if args.sync_batch_norm else None,
        # A weight decay w changes a kernel by w * kernel; the gradient of l2 * kernel ** 2 is twice
        # that.
        kernel_l2=args.weight_decay / 2,
    )
    model = tnt.Model(module, seed=args.seed)
    model.compile(
        optimizer=tnt.optimizers.SGD(make_schedule(args, num_train), momentum=0.9),
        loss=make_loss(args.label_smoothing),
        metrics=[
            tnt.metrics.SparseCategoricalAccuracy(name="top1"),
            tnt.metrics.SparseTopKCategoricalAccuracy(k=min(5, args.num_classes), name="top5"),
        ],
        steps_per_execution=args.steps_per_execution,
    )
    return model


def make_callbacks(args):
    """Returns the callbacks that the flags ask for."""
    callbacks = []
    if args.model_dir:
        path = Path(args.model_dir) / "checkpoint-{epoch:04d}"
        callbacks.append(tnt.callbacks.ModelCheckpoint(path, save_weights_only=True))
    if args.tensorboard:
        callbacks.append(tnt.callbacks.TensorBoard(args.tensorboard))
    if args.profile_runtimes:
        profiler = tnt.callbacks.RuntimeProfiler(
            args.batch_size, logging_freq=args.logging_freq, print_freq=args.print_freq
        )
        callbacks.append(tnt.callbacks.OnMaster(profiler))
    return callbacks


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data_dir", help="folder of the images")
    add(
        "--synthetic_data",
        action="store_true",
        help="random images, to measure everything but the input",
    )
    add(
        "--tfds_name",
        default="imagenet2012",
        help="name of the set of TensorFlow Datasets in --data_dir",
    )
    add(
        "--label_offset",
        type=int,
        default=-1,
        help="added to the labels of TFRecords, which count ImageNet's classes from 1",
    )
    add("--model", choices=MODELS, default="resnet50", help="network")
    add("--num_classes", type=int, default=1000, help="classes")
    add("--image_size", type=int, default=224, help="height and width of the network's input")
    add(
        "--preprocessing",
        choices=("mean", "mean_std"),
        default="mean",
        help="subtract ImageNet's means, or standardize",
    )
    add("--batch_size", type=int, default=256, help="images of a step on all devices together")
    add("--train_epochs", type=int, default=90, help="epochs")
    add(
        "--epochs_between_evals",
        "--val_freq",
        type=int,
        default=1,
        help="epochs from one validation to the next",
    )
    add(
        "--train_num_samples",
        type=int,
        default=1_281_167,
        help="most training images, and the number of the TFRecords'",
    )
    add("--val_num_samples", type=int, default=50_000, help="most validation images")
    add(
        "--schedule",
        choices=("steps", "exponential"),
        default="steps",
        help="drops at 30, 60 and 80 of 90 epochs, or slow decay",
    )
    add(
        "--base_learning_rate",
        type=float,
        default=0.1,
        help="rate for a batch of 256; it is scaled with the batch",
    )
    add("--warmup_epochs", type=float, default=5, help="epochs of linear warm-up")
    add("--weight_decay", type=float, default=1e-4, help="decay of the kernels")
    add(
        "--label_smoothing",
        type=float,
        default=0.0,
        help="share of the uniform distribution in the targets",
    )
    add("--bfloat16", action="store_true", help="compute in bfloat16")
    add("--sync_batch_norm", action="store_true", help="batch statistics over all devices")
    add(
        "--drop_remainder",
        action="store_true",
        help="leave out the incomplete last batch of an epoch",
    )
    add("--steps_per_execution", type=int, default=1, help="steps of one compiled program")
    add("--shuffle_seed", type=int, default=42, help="seed of order and augmentation")
    add("--seed", type=int, default=0, help="seed of the weights")
    add("--model_dir", help="folder for checkpoints")
    add("--tensorboard", help="folder for TensorBoard")
    add(
        "--profile_runtimes",
        "--enable_time_history",
        action="store_true",
        help="print the times of steps",
    )
    add(
        "--logging_freq",
        type=int,
        default=10,
        help="steps between two records of --profile_runtimes",
    )
    add("--print_freq", type=int, default=30, help="steps between two lines of --profile_runtimes")
    add(
        "--verbose",
        type=int,
        choices=(0, 1, 2),
        default=2,
        help="0 silent, 1 bar, 2 one line an epoch",
    )
    args = parser.parse_args(arguments)
    if not args.synthetic_data and not (args.data_dir and Path(args.data_dir).is_dir()):
        parser.error(
            f"--data_dir must be a folder of images, but is {args.data_dir}. --synthetic_data "
            f"needs no data."
        )
    return args


def main():
    args = parse_args()
    train, valid, num_train = make_data(args)
    model = make_model(args, num_train)
    start = time.perf_counter()
    model.fit(
        train,
        epochs=args.train_epochs,
        callbacks=make_callbacks(args),
        validation_data=valid,
        validation_freq=args.epochs_between_evals,
        verbose=args.verbose,
    )
    seconds = time.perf_counter() - start
    result = model.evaluate(valid, verbose=0, return_dict=True)
    if tnt.is_master_rank():
        print(
            f"Validation: top-1 {100 * result['top1']:.2f} %, top-5 {100 * result['top5']:.2f} "
            f"%, loss {result['loss']:.4f}"
        )
        print(f"Training took {seconds:.1f} s on {tnt.get_size()} device(s).")


if __name__ == "__main__":
    main()
