import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

from tnt_jax.data.tf.rowwise import why_not_rowwise  # noqa: E402

TABLE = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(tf.range(9, dtype=tf.int64), tf.range(9) * 2), -1
)
WEIGHTS = tf.reshape(tf.range(12.0), [3, 4])

# Functions on batches `(float32 [rows, 2, 3], int64 [rows])` that treat each row by itself, and are
# known to.
ROWWISE = [
    lambda x, i: (x, i),
    lambda x, i: ({"a": x}, i, tf.ones_like(i)),
    lambda x, i: (tf.cast(x, tf.float64) / 255.0 - 1, i * 2 + 1),
    lambda x, i: (x - [0.1, 0.2, 0.3], tf.one_hot(i, 9)),
    lambda x, i: (tf.nn.relu(x) * x, i > 3),
    lambda x, i: (tf.reshape(x, [-1, 6]), i),
    lambda x, i: (x[:, 0], x[..., 1]),
    lambda x, i: (tf.transpose(x, [0, 2, 1]), tf.expand_dims(i, -1)),
    lambda x, i: (tf.reduce_mean(x, axis=[1, 2]), tf.argmax(x, axis=-1)),
    lambda x, i: (tf.pad(x, [[0, 0], [1, 1], [0, 2]]), i),
    lambda x, i: (tf.concat([x, x * 2], axis=-1), i),
    lambda x, i: (tf.gather(WEIGHTS[0], tf.minimum(i, 3)), TABLE.lookup(i)),
    lambda x, i: (tf.image.resize(x[..., None], [4, 5]), i),
    lambda x, i: (tf.clip_by_value(x, 0.2, 0.7), tf.where(i > 3, i, -i)),
]
# Functions of which a row depends on other rows, on its place, or on the number of rows.
MIXING = [
    lambda x, i: (x - tf.reduce_mean(x), i),
    lambda x, i: (x / tf.reduce_max(x, axis=0), i),
    lambda x, i: (x[::-1], i),
    lambda x, i: (x[1:], i[1:]),
    lambda x, i: (tf.roll(x, 1, axis=0), i),
    lambda x, i: (tf.reshape(x, [-1, 3]), i),
    lambda x, i: (tf.reshape(x, [2, -1, 3]), i),
    lambda x, i: (tf.transpose(x, [1, 0, 2]), i),
    lambda x, i: (x, tf.argsort(i)),
    lambda x, i: (x, tf.range(tf.shape(i)[0])),
    lambda x, i: (x, tf.cumsum(i)),
    lambda x, i: (tf.concat([x, x], axis=0), i),
    lambda x, i: (x, tf.constant([1, 2, 3])),
    lambda x, i: (tf.gather(x, i % 2), i),
    lambda x, i: (x, tf.cast(i, tf.float32) * x[:, 0, 0] + x[:, None, 0, 0]),
    lambda x, i: (x * tf.cast(i, tf.float32)[:3, None, None], i),
    lambda x, i: (tf.pad(x, [[1, 0], [0, 0], [0, 0]]), i),
    lambda x, i: (tf.linalg.matmul(x[:, 0], x[:, 0], transpose_b=True), i),
    lambda x, i: (x + tf.range(3.0)[:, None, None], i),
    lambda x, i: (tf.boolean_mask(x, i > 2), i),
    lambda x, i: (tf.expand_dims(x, 0), i),
    lambda x, i: (x[None], i),
    lambda x, i: (x[0], i),
    lambda x, i: (x[..., 0, 0, 0], i),
    lambda x, i: (x[::2], i),
]
ROWS = (np.random.default_rng(0).random((3, 2, 3), np.float32), np.array([5, 1, 7]))


def wrapper_of(function):
    spec = (tf.TensorSpec([None, 2, 3], tf.float32), tf.TensorSpec([None], tf.int64))
    batches = tf.data.Dataset.from_generator(lambda: iter([ROWS]), output_signature=spec)
    return batches.map(function)._map_func


def rows_apart(function):
    """Returns the results for each row alone, put together."""
    parts = [
        tf.nest.flatten(function(*(tf.constant(x[row : row + 1]) for x in ROWS)))
        for row in range(3)
    ]
    return [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]


@pytest.mark.parametrize("number", range(len(ROWWISE)))
def test_functions_on_rows_are_recognised(number):
    function = ROWWISE[number]
    assert why_not_rowwise(wrapper_of(function)) is None
    for whole, apart in zip(
        tf.nest.flatten(function(*map(tf.constant, ROWS))), rows_apart(function), strict=True
    ):
        np.testing.assert_allclose(whole, apart, rtol=1e-6)


@pytest.mark.parametrize("number", range(len(MIXING)))
def test_functions_that_mix_rows_are_never_taken_for_others(number):
    assert why_not_rowwise(wrapper_of(MIXING[number])) is not None


def test_reason_names_the_operation():
    assert why_not_rowwise(wrapper_of(lambda x, i: (tf.roll(x, 1, axis=0), i))) == "Roll"
    assert (
        why_not_rowwise(wrapper_of(lambda x, i: (x, tf.constant([1]))))
        == "an output that does not depend on the rows"
    )


def test_operations_may_not_broadcast_rows_against_each_other():
    # [rows, 1] + [rows] is [rows, rows]: each result depends on two rows.
    assert why_not_rowwise(wrapper_of(lambda x, i: (x, i[:, None] + i))) == "AddV2"
