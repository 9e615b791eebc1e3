"""The global batch decides the mathematics: training on any number of ranks equals a plain loop on
one device.
"""

from functools import cache, partial

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


# Numbers of examples and sizes of batches, with the number of ranks of the default run: batches that
# divide, that do not, a last batch smaller than the number of ranks, one batch only, one row in the
# last batch.
RUN_BY_DEFAULT = {
    (32, 8): 8,
    (30, 10): 3,
    (29, 9): 3,
    (26, 8): 3,
    (17, 8): 8,
    (8, 8): 8,
    (19, 9): 8,
}


@pytest.mark.parametrize(
    ("num_examples", "size", "num_ranks"),
    [
        pytest.param(
            *sizes, num_ranks, marks=[] if RUN_BY_DEFAULT[sizes] == num_ranks else pytest.mark.long
        )
        for sizes in RUN_BY_DEFAULT
        for num_ranks in (1, 2, 3, 4, 8)
    ],
)
def test_sgd_equals_a_plain_loop(use_ranks, num_ranks, num_examples, size):
    use_ranks(num_ranks)
    data = make_data(num_examples)
    expected_history, expected = plain_loop("sgd", num_examples, size)
    history, model = fit(Net(), OPTIMIZERS["sgd"](), data, size)
    assert_close(history, expected_history)
    assert_close(model.variables["params"], expected["params"])


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4, 3))
@pytest.mark.parametrize(
    "case",
    [
        *long_but_last((17, 8, "momentum"), (29, 9, "momentum")),
        *long_but_last((29, 9, "adam"), (17, 8, "adam")),
    ],
)
def test_other_optimizers_equal_a_plain_loop(use_ranks, num_ranks, case):
    use_ranks(num_ranks)
    num_examples, size, optimizer = case
    data = make_data(num_examples)
    expected_history, expected = plain_loop(optimizer, num_examples, size)
    history, model = fit(Net(), OPTIMIZERS[optimizer](), data, size)
    assert_close(history, expected_history)
    assert_close(model.variables["params"], expected["params"])


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 8, 3))
# A batch of one or two rows is left out: its normalisation amplifies rounding beyond any tolerance.
@pytest.mark.parametrize("sizes", long_but_last((32, 8), (23, 9), (31, 9)))
def test_sample_weights_batch_norm_and_dropout_equal_a_plain_loop(use_ranks, num_ranks, sizes):
    use_ranks(num_ranks)
    num_examples, size = sizes
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
    without, _ = plain_loop("sgd", 32, 8)
    assert abs(with_dropout["loss"][0] - without["loss"][0]) > 1e-3


@pytest.mark.parametrize("num_ranks", long_but_last(1, 3, 4, 8))
@pytest.mark.parametrize("sizes", [*long_but_last((17, 8), (29, 9)), (5, 8)])
def test_evaluate_and_predict_see_every_row_once(use_ranks, num_ranks, sizes):
    use_ranks(num_ranks)
    num_examples, size = sizes
    x, y, _ = make_data(num_examples)
    net = Net(batch_norm=True, dropout=0.5, axis_name="data")
    variables = jax.jit(partial(net.init, train=False))(jax.random.key(1), x[:1])
    logits = np.asarray(jax.jit(partial(net.apply, train=False))(variables, x))
    model = tnt.Model(net, variables=variables)
    model.compile(
        "sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    loss, accuracy = model.evaluate(x, y, batch_size=size, verbose=0)
    powers = np.exp(logits)
    expected = -np.mean(np.log(powers[np.arange(num_examples), y] / powers.sum(-1)))
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
    assert_close(history["loss"], plain_loop("sgd", 48, 16)[0]["loss"])


def test_shuffled_arrays_are_in_the_same_order_on_any_number_of_ranks(use_ranks):
    histories = []
    for num_ranks in (1, 8):
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
    assert set(histories[0]) == {"loss", "val_loss"}


@pytest.mark.parametrize(
    ("num_ranks", "size", "rest", "options", "warns", "is_poor"),
    [
        (2, 30, 0, {}, True, True),
        (2, 32, 3, {}, True, False),  # The last batch of 3 rows is no reason.
        (1, 8, 0, {}, False, False),
        (2, 8, 0, {"axis_name": "data"}, False, False),
        (2, 8, 0, {"batch_norm": False}, False, False),
    ],
)
def test_statistics_of_each_rank_are_named_once(
    use_ranks, num_ranks, size, rest, options, warns, is_poor, capsys
):
    use_ranks(num_ranks)
    fit(Net(**{"batch_norm": True, **options}), optax.sgd(0.1), make_data(2 * size + rest), size)
    said = capsys.readouterr().err
    assert (
        said.count(
            f"over each rank's {size // 2} row(s) of a batch, so results depend on the number of "
            "ranks"
        )
        == warns
    )
    assert said.count("below 16 rows they are also inaccurate") == is_poor
