"""Distillation: a small network learns from a larger one, beside the labels.

    tnt-jax -n 2 -- examples/gallery/distillation.py

Hinton et al. 2015, arXiv:1503.02531, section 2. The student has 200 labels alone; the teacher,
which has seen all of them, says what it thinks of the other images.
"""

import flax.linen as nn
import numpy as np
import optax
from digits_data import load

import tnt_jax as tnt

TEMPERATURE = 3.0
NUM_LABELS = 200


class Teacher(nn.Module):
    """Two convolutions; logits `[batch, 10]`."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


class Student(nn.Module):
    """Sixteen hidden units; logits `[batch, 10]`."""

    @nn.compact
    def __call__(self, images):
        return nn.Dense(10)(nn.relu(nn.Dense(16)(images.reshape(len(images), -1))))


def trained(module, images, labels, epochs):
    """Returns a model that has learnt labels."""
    model = tnt.Model(module)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    model.fit(images, labels, batch_size=64, epochs=epochs, verbose=0)
    return model


def distil(params, batch, rngs, apply):
    """The teacher's softened answer, and the label where there is one."""
    logits = apply(params, batch.inputs)
    teacher, label, has_label = (batch.targets[name] for name in ("teacher", "label", "known"))
    soft = optax.convex_kl_divergence(
        nn.log_softmax(logits / TEMPERATURE), nn.softmax(teacher / TEMPERATURE)
    )
    hard = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return TEMPERATURE**2 * soft + has_label * hard


def main(epochs=30):
    """Trains both; returns the accuracy of the student alone and of the one that was taught."""
    (images, labels), test = load()
    teacher = trained(Teacher(), images, labels, epochs // 2)
    alone = trained(Student(), images[:NUM_LABELS], labels[:NUM_LABELS], 4 * epochs)
    known = (np.arange(len(labels)) < NUM_LABELS).astype(np.float32)
    answers = {"teacher": teacher.predict(images, verbose=0), "label": labels, "known": known}
    student = tnt.Model(Student())
    student.compile(tnt.optimizers.Adam(2e-3), objective=distil)
    student.fit(images, answers, batch_size=64, epochs=epochs, verbose=0)
    found = np.argmax(student.predict(test[0], verbose=0), axis=-1)
    accuracies = alone.evaluate(*test, verbose=0)[1], float(np.mean(found == test[1]))
    if tnt.is_master_rank():
        print("student alone: {:.3f}, with a teacher: {:.3f}".format(*accuracies))
    return accuracies


if __name__ == "__main__":
    main()
