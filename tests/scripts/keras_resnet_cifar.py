"""Trains a residual network on images of 10 classes, in plain Keras; a test runs it again with the
import and the model changed.
"""

import argparse
import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

NUM_CLASSES = 10
BASE_LEARNING_RATE, BASE_BATCH_SIZE = 0.1, 128
WEIGHT_DECAY = keras.regularizers.L2(2e-4)


def parse_flags():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data_dir", help="folder with cifar10.npz; images are made up without it")
    parser.add_argument(
        "--model_dir", required=True, help="folder of checkpoints, logs and the exported model"
    )
    parser.add_argument("--train_epochs", type=int, default=182)
    parser.add_argument("--epochs_between_evals", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=128, help="global batch")
    parser.add_argument("--num_images", type=int, default=512, help="made-up training images")
    parser.add_argument("--image_size", type=int, default=32)
    parser.add_argument("--blocks_per_stage", type=int, default=5)
    parser.add_argument(
        "--filters", type=int, nargs="+", default=[16, 32, 64], help="filters of each stage"
    )
    parser.add_argument("--warmup_epochs", type=int, default=5)
    parser.add_argument(
        "--schedule",
        choices=("steps", "epochs"),
        default="steps",
        help="who changes the learning rate",
    )
    parser.add_argument(
        "--patience", type=int, default=0, help="end without progress for so many epochs; 0 never"
    )
    parser.add_argument("--enable_tensorboard", action="store_true")
    parser.add_argument("--enable_checkpoint_and_export", action="store_true")
    parser.add_argument("--profile_runtime", action="store_true")
    parser.add_argument("--logging_freq", type=int, default=100)
    parser.add_argument("--verbose", type=int, default=2)
    return parser.parse_args()


# Data


def load_images(flags):
    """Returns training and validation images `[n, size, size, 3]` as bytes, with labels."""
    if flags.data_dir:
        with np.load(os.path.join(flags.data_dir, "cifar10.npz")) as file:
            return (file["x_train"], file["y_train"].ravel()), (
                file["x_test"],
                file["y_test"].ravel(),
            )
    rng = np.random.default_rng(0)
    size, parts = flags.image_size, []
    patterns = rng.integers(0, 256, (NUM_CLASSES, size, size, 3))
    for count in (flags.num_images, flags.num_images // 4):
        labels = rng.integers(0, NUM_CLASSES, count)
        images = 0.6 * patterns[labels] + 0.4 * rng.integers(0, 256, (count, size, size, 3))
        parts.append((images.astype(np.uint8), labels))
    return parts


def normalize(image, label):
    return (tf.cast(image, tf.float32) - 127.5) / 64.0, tf.cast(label, tf.int32)


def mirror_every_second(index, example):
    image, label = example
    return tf.cond(index % 2 == 0, lambda: image, lambda: tf.image.flip_left_right(image)), label


def input_fn(images, labels, *, batch_size, is_training):
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    if is_training:
        dataset = dataset.shuffle(1024, seed=42, reshuffle_each_iteration=False)
        dataset = dataset.enumerate().map(mirror_every_second, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.map(normalize, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=is_training).prefetch(tf.data.AUTOTUNE)


# Model


def conv_bn(x, filters, *, kernel=3, strides=1, activation=True):
    conv = keras.layers.Conv2D(
        filters,
        kernel,
        strides,
        "same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=WEIGHT_DECAY,
    )
    x = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(conv(x))
    return keras.layers.ReLU()(x) if activation else x


def resnet(image_size, blocks_per_stage, filters_of_stages):
    inputs = keras.Input((image_size, image_size, 3))
    x = conv_bn(inputs, filters_of_stages[0])
    for stage, filters in enumerate(filters_of_stages):
        for block in range(blocks_per_stage):
            strides = 2 if stage > 0 and block == 0 else 1
            shortcut = (
                conv_bn(x, filters, kernel=1, strides=strides, activation=False)
                if block == 0
                else x
            )
            x = conv_bn(x, filters, strides=strides)
            x = conv_bn(x, filters, activation=False)
            x = keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(NUM_CLASSES, kernel_regularizer=WEIGHT_DECAY)(x)
    return keras.Model(inputs, keras.layers.Activation("softmax", dtype="float32")(x))


# Learning rate


class PiecewiseConstantDecayWithWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """Grows from 0 over the first epochs, then falls by a multiplier at each boundary."""

    def __init__(self, batch_size, epoch_size, warmup_epochs, boundaries, multipliers):
        if len(boundaries) != len(multipliers) - 1:
            raise ValueError("The number of multipliers must be the number of boundaries + 1.")
        self.settings = (batch_size, epoch_size, warmup_epochs, boundaries, multipliers)
        self.steps_per_epoch = epoch_size // batch_size
        self.peak = BASE_LEARNING_RATE * batch_size / BASE_BATCH_SIZE
        self.boundaries, self.multipliers = (
            [epoch * self.steps_per_epoch for epoch in boundaries],
            multipliers,
        )
        self.warmup_steps = warmup_epochs * self.steps_per_epoch

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        rate = keras.ops.ones_like(step) * self.peak * self.multipliers[0]
        for boundary, multiplier in zip(self.boundaries, self.multipliers[1:], strict=True):
            rate = keras.ops.where(step > boundary, self.peak * multiplier, rate)
        return keras.ops.where(step < self.warmup_steps, self.peak * step / self.warmup_steps, rate)

    def get_config(self):
        names = ("batch_size", "epoch_size", "warmup_epochs", "boundaries", "multipliers")
        return dict(zip(names, self.settings, strict=True))


class WarmupByBatch(keras.callbacks.Callback):
    """Grows the rate linearly to its target, batch by batch, as in Goyal et al. 2017."""

    def __init__(self, target, epochs):
        super().__init__()
        self.target, self.epochs, self.done = target, epochs, 0

    def on_train_batch_begin(self, batch, logs=None):
        num_steps = self.epochs * self.params["steps"]
        if self.done < num_steps:
            self.model.optimizer.learning_rate = self.target * (self.done + 1) / num_steps
        self.done += 1


# Callbacks


class RuntimeProfiler(keras.callbacks.Callback):
    """Prints throughput every few batches and the time of each epoch."""

    def __init__(self, batch_size, logging_freq):
        super().__init__()
        self.batch_size, self.logging_freq, self.steps = batch_size, logging_freq, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_start = self.last = time.time()

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps % self.logging_freq == 0:
            now = time.time()
            rate = self.batch_size * self.logging_freq / (now - self.last)
            print(f"PROFILE step {self.steps} loss {logs['loss']:.4f} examples_per_s {rate:.1f}")
            self.last = now

    def on_epoch_end(self, epoch, logs=None):
        print(
            f"PROFILE epoch {epoch + 1}/{self.params['epochs']} took "
            f"{time.time() - self.epoch_start:.2f} s"
        )


def make_callbacks(flags, peak):
    folder = flags.model_dir
    callbacks = [
        keras.callbacks.CSVLogger(os.path.join(folder, "history.csv")),
        keras.callbacks.TerminateOnNaN(),
    ]
    if flags.schedule == "epochs":
        callbacks.append(
            keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: peak if epoch < 2 else rate * 0.5
            )
        )
        callbacks.append(WarmupByBatch(peak, flags.warmup_epochs))
    if flags.patience:
        callbacks.append(
            keras.callbacks.EarlyStopping(
                "val_loss", patience=flags.patience, restore_best_weights=True
            )
        )
    if flags.enable_tensorboard:
        callbacks.append(
            keras.callbacks.TensorBoard(os.path.join(folder, "tensorboard"), write_graph=False)
        )
    if flags.enable_checkpoint_and_export:
        path = os.path.join(folder, "model.ckpt-{epoch:04d}.weights.h5")
        callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
        best = os.path.join(folder, "best.keras")
        callbacks.append(
            keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True)
        )
    if flags.profile_runtime:
        callbacks.append(RuntimeProfiler(flags.batch_size, flags.logging_freq))
    return callbacks


def main():
    flags = parse_flags()
    os.makedirs(flags.model_dir, exist_ok=True)
    keras.utils.set_random_seed(42)
    train, validation = load_images(flags)
    train_dataset = input_fn(*train, batch_size=flags.batch_size, is_training=True)
    validation_dataset = input_fn(*validation, batch_size=flags.batch_size, is_training=False)

    schedule = PiecewiseConstantDecayWithWarmup(
        flags.batch_size,
        len(train[0]),
        flags.warmup_epochs,
        boundaries=[91, 136],
        multipliers=[1.0, 0.1, 0.01],
    )
    model = resnet(train[0].shape[1], flags.blocks_per_stage, flags.filters)
    model.compile(
        optimizer=keras.optimizers.SGD(
            schedule if flags.schedule == "steps" else schedule.peak, momentum=0.9
        ),
        loss="sparse_categorical_crossentropy",
        metrics=[
            "sparse_categorical_accuracy",
            keras.metrics.SparseTopKCategoricalAccuracy(k=3, name="top3"),
        ],
    )
    model.summary()
    history = model.fit(
        train_dataset,
        epochs=flags.train_epochs,
        callbacks=make_callbacks(flags, schedule.peak),
        validation_data=validation_dataset,
        validation_freq=flags.epochs_between_evals,
        verbose=flags.verbose,
    )
    results = model.evaluate(validation_dataset, verbose=0, return_dict=True)
    probabilities = model.predict(validation_dataset, verbose=0)
    hits = np.mean(np.argmax(probabilities, axis=-1) == validation[1])
    print(
        f"Evaluation: {results['loss']:.4f}, {results['sparse_categorical_accuracy']:.4f}; by "
        f"hand {hits:.4f}"
    )
    if flags.enable_checkpoint_and_export:
        export = os.path.join(flags.model_dir, "export.keras")
        model.save(export)
        custom = {"PiecewiseConstantDecayWithWarmup": PiecewiseConstantDecayWithWarmup}
        loaded = keras.models.load_model(export, custom_objects=custom)
        difference = np.abs(loaded.predict(validation_dataset, verbose=0) - probabilities).max()
        print(f"The exported model differs by {difference:.1e}")
        model.load_weights(os.path.join(flags.model_dir, "model.ckpt-0001.weights.h5"))
        results["loss_of_first_epoch"] = model.evaluate(
            validation_dataset, verbose=0, return_dict=True
        )["loss"]
    final = {name: [float(value) for value in values] for name, values in history.history.items()}
    print("RESULT " + json.dumps({"history": final, "results": results, "hits": float(hits)}))


if __name__ == "__main__":
    main()
