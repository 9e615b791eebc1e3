"""The global batch decides the mathematics: training on any number of ranks equals a plain loop on
one device.
"""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from long_params import long_but_last
from reference_trainer import Net, make_data, train
from training import assert_close

import tnt_jax as tnt
from tnt_jax.distributed.sums.random_rows import row_key

TOLERANCE = 1e-5


def batches_of(x, y, weight, size):
    return [
        (x[i : i + size], y[i : i + size], weight[i : i + size]) for i in range(0, len(x), size)
    ]


def fit(net, optimizer, data, size, *, epochs=2, weighted=False):
    x, y, weight = data
    model = tnt.Model(net)
    model.compile(
        optimizer,
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        x,
        y,
        batch_size=size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        sample_weight=weight if weighted else None,
    ).history
    return history, model


# Batches that divide, that do not, a last batch smaller than the number of ranks, one batch only,
# one row in the last batch.
SIZES = [(32, 8), (30, 10), (29, 9), (26, 8), (17, 8), (8, 8), (19, 9)]


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
}


@cache
def plain_loop(optimizer, num_examples, size):
    """Returns history and variables of the loop on one device, which are the same for any number of
    ranks.
    """
    x, y, _ = make_data(num_examples)
    batches = batches_of(x, y, np.ones(num_examples, np.float32), size)
    return train(Net(), OPTIMIZERS[optimizer](), batches, epochs=2)


@pytest.mark.parametrize("num_ranks", [*long_but_last(1, 2, 4, 3), 8])
@pytest.mark.parametrize(("num_examples", "size"), SIZES)
def test_sgd_equals_a_plain_loop(use_ranks, num_ranks, num_examples, size):
    use_ranks(num_ranks)
    data = make_data(num_examples)
    expected_history, expected = plain_loop("sgd", num_examples, size)
    history, model = fit(Net(), OPTIMIZERS["sgd"](), data, size)
    assert_close(history, expected_history)
    assert_close(model.variables["params"], expected["params"])


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4, 3))
@pytest.mark.parametrize(("num_examples", "size"), [(29, 9), (17, 8)])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_other_optimizers_equal_a_plain_loop(use_ranks, num_ranks, num_examples, size, optimizer):
    use_ranks(num_ranks)
    data = make_data(num_examples)
    expected_history, expected = plain_loop(optimizer, num_examples, size)
    history, model = fit(Net(), OPTIMIZERS[optimizer](), data, size)
    assert_close(history, expected_history)
    assert_close(model.variables["params"], expected["params"])


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 8, 3))
# A batch of one or two rows is left out: its normalisation amplifies rounding beyond any tolerance.
@pytest.mark.parametrize(("num_examples", "size"), [(32, 8), (31, 9), (23, 9)])
def test_sample_weights_batch_norm_and_dropout_equal_a_plain_loop(
    use_ranks, num_ranks, num_examples, size
):
    use_ranks(num_ranks)
    data = make_data(num_examples)

    def make_key(step, rows):
        # The numbers of a single device that holds the whole batch; Linen's dropout stream is the
        # second fold.
        return jax.random.fold_in(row_key(jax.random.fold_in(jax.random.key(0), step), 0), 1)

    net = Net(batch_norm=True, dropout=0.4)
    expected_history, expected = train(
        net, optax.sgd(0.1), batches_of(*data, size), epochs=2, make_key=make_key
    )
    history, model = fit(
        Net(batch_norm=True, dropout=0.4, axis_name="data"),
        optax.sgd(0.1),
        data,
        size,
        weighted=True,
    )
    assert_close(history, expected_history)
    assert_close(model.variables, expected)


def test_dropout_is_on_in_training(use_ranks):
    use_ranks(4)
    data = make_data(32)
    with_dropout, _ = fit(Net(dropout=0.5), optax.sgd(0.1), data, 8)
    without, _ = fit(Net(), optax.sgd(0.1), data, 8)
    assert abs(with_dropout["loss"][0] - without["loss"][0]) > 1e-3


@pytest.mark.parametrize("num_ranks", long_but_last(1, 3, 4, 8))
@pytest.mark.parametrize(("num_examples", "size"), [(29, 9), (17, 8), (5, 8)])
def test_evaluate_and_predict_see_every_row_once(use_ranks, num_ranks, num_examples, size):
    use_ranks(num_ranks)
    x, y, _ = make_data(num_examples)
    net = Net(batch_norm=True, dropout=0.5, axis_name="data")
    variables = net.init(jax.random.key(1), x[:1], train=False)
    logits = np.asarray(net.apply(variables, x, train=False))
    model = tnt.Model(net, variables=variables)
    model.compile(
        "sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    loss, accuracy = model.evaluate(x, y, batch_size=size, verbose=0)
    expected = np.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))
    np.testing.assert_allclose(loss, expected, rtol=TOLERANCE)
    assert accuracy == pytest.approx(np.mean(logits.argmax(-1) == y), abs=1e-6)
    np.testing.assert_allclose(model.predict(x, batch_size=size, verbose=0), logits, atol=TOLERANCE)


@pytest.mark.parametrize("num_ranks", long_but_last(2, 4))
def test_micro_batch_size_times_ranks_is_the_global_batch(use_ranks, num_ranks):
    use_ranks(num_ranks)
    x, y, _ = make_data(48)
    model = tnt.Model(Net())
    model.compile(optax.sgd(0.1), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(
        x, y, epochs=2, shuffle=False, verbose=0, tnt_micro_batch_size=16 // num_ranks
    ).history
    expected, _ = train(
        Net(), optax.sgd(0.1), batches_of(x, y, np.ones(48, np.float32), 16), epochs=2
    )
    assert_close(history["loss"], expected["loss"])


def test_shuffled_arrays_are_in_the_same_order_on_any_number_of_ranks(use_ranks):
    histories = []
    for num_ranks in (1, 2, 8):
        use_ranks(num_ranks)
        x, y, _ = make_data(37)
        model = tnt.Model(Net(dropout=0.3), seed=5)
        model.compile(
            optax.sgd(0.1), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        histories.append(
            model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_split=0.2).history
        )
    assert_close(histories[1], histories[0])
    assert_close(histories[2], histories[0])
    assert set(histories[0]) == {"loss", "val_loss"}


@pytest.mark.parametrize(
    ("num_ranks", "size", "options", "warns", "is_poor"),
    [
        (2, 30, {}, True, True),
        (2, 32, {}, True, False),
        (1, 8, {}, False, False),
        (2, 8, {"axis_name": "data"}, False, False),
        (2, 8, {"batch_norm": False}, False, False),
    ],
)
def test_statistics_of_each_rank_are_named_once(
    use_ranks, num_ranks, size, options, warns, is_poor, capsys
):
    use_ranks(num_ranks)
    # The last batch of 3 rows is no reason.
    fit(Net(**{"batch_norm": True, **options}), optax.sgd(0.1), make_data(2 * size + 3), size)
    said = capsys.readouterr().err
    assert (
        said.count(
            f"over each rank's {size // 2} row(s) of a batch, so results depend on the number of "
            "ranks"
        )
        == warns
    )
    assert said.count("below 16 rows they are also inaccurate") == is_poor
