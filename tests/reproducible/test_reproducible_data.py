"""The same bits on any number of devices from data that every process reads for itself: `tf.data`
and random access.
"""

import numpy as np
import optax
import pytest
from reproducible_checks import Mlp, assert_equal_on, compiled, fit_and_digest, images

from tnt_jax.data.indexed.random_access import RandomAccess

# 43 examples in batches of 12: on 8 virtual ranks every batch is padded, and the last one has 7
# rows for 8 ranks.
EXAMPLES, BATCH, VIRTUAL_RANKS = 43, 12, 8


class Examples:
    def __init__(self):
        self.x, self.y = images(EXAMPLES)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def noisy(example, generator):
    return example[0] + generator.normal(size=example[0].shape).astype(np.float32), example[1]


def tf_dataset():
    """Shuffles and augments without a seed, and asks for any order."""
    tf = pytest.importorskip("tensorflow")
    tf.random.set_seed(
        None
    )  # A global seed, which other tests may have set, gives each new operation a seed of its own.

    def augment(x, y):
        return x + tf.random.normal(tf.shape(x)), y

    dataset = tf.data.Dataset.from_tensor_slices(images(EXAMPLES)).shuffle(EXAMPLES)
    return dataset.map(augment, num_parallel_calls=2, deterministic=False).batch(BATCH).prefetch(1)


SOURCES = {
    "tf.data": tf_dataset,
    "random access": lambda: RandomAccess(
        Examples(), batch_size=BATCH, shuffle=True, transform=noisy, num_workers=2
    ),
}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        pytest.param("random access", (1, 8), marks=pytest.mark.long),
        pytest.param("random access", (2, 4, 8), marks=pytest.mark.long),
        pytest.param("tf.data", (1, 2, 4, 8), marks=pytest.mark.long),
    ],
)
def test_any_number_of_devices_gives_the_same_bits(name, counts):
    def run():
        model = compiled(Mlp(), optax.adam(0.01), virtual_ranks=VIRTUAL_RANKS)
        return fit_and_digest(model, SOURCES[name](), predict_on=images(EXAMPLES)[0])

    assert_equal_on(counts, run)
