"""The parts of the examples that are formulas or checks."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_modules import EXAMPLES
from long_params import long_but_last

from tnt_jax.data import TokenPairs

import configuration  # isort: skip
import learning_rates  # isort: skip
import text_classification  # isort: skip
import train as course  # isort: skip
import translation_data  # isort: skip
import translation_training  # isort: skip


@pytest.mark.parametrize(
    ("epoch", "rate"),
    # 0.1 * 512 / 256 after five epochs of warm-up, divided by ten after 30, 60 and 80 epochs.
    [
        (0, 0.0),
        (2.5, 0.1),
        (5, 0.2),
        (29.9, 0.2),
        (30, 0.02),
        (60, 0.002),
        (79.9, 0.002),
        (80, 0.0002),
        (89, 0.0002),
    ],
)
def test_warmup_and_steps_are_goyals(epoch, rate):
    schedule = learning_rates.WarmupSteps(0.1 * 512 / 256, steps_per_epoch=10)
    np.testing.assert_allclose(jax.jit(schedule)(round(10 * epoch)), rate, rtol=1e-5, atol=1e-9)


def test_steps_need_one_multiplier_more_than_boundaries():
    with pytest.raises(ValueError, match="one multiplier more than boundaries"):
        learning_rates.WarmupSteps(
            0.1, steps_per_epoch=10, boundaries=(1, 2), multipliers=(1.0, 0.1)
        )


@pytest.mark.parametrize(
    ("epoch", "rate"), [(1, 0.02), (5, 0.1 * 0.97 ** (5 / 2.4)), (24, 0.1 * 0.97**10)]
)
def test_exponential_decay_counts_from_the_first_epoch(epoch, rate):
    schedule = learning_rates.WarmupExponential(0.1, steps_per_epoch=7)
    np.testing.assert_allclose(schedule(7 * epoch), rate, rtol=1e-5)


def test_inverse_square_root_equals_the_papers_formula():
    schedule = learning_rates.InverseSquareRoot(2.0, width=512, warmup_steps=4000)
    for step in (1, 100, 4000, 4001, 100_000):
        # Vaswani et al. 2017, eq. 3: d^-0.5 * min(step^-0.5, step * warmup^-1.5).
        expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        np.testing.assert_allclose(schedule(step - 1), expected, rtol=1e-5)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_course_schedule_warms_up_as_horovod_does(num_ranks):
    lr, warmup, steps = 0.01, 5, 20
    parts = [
        {"start_epoch": 5, "end_epoch": 8, "multiplier": 1.0},
        {"start_epoch": 8, "multiplier": 0.1},
    ]
    peak = course.scaled_rate(lr, "linear", num_ranks)
    schedule = course.CourseSchedule(
        lr, peak, steps_per_epoch=steps, warmup_epochs=warmup, parts=parts
    )
    for step in (0, 7, 50, 99):
        # Horovod's LearningRateWarmupCallback: lr * p * (1 / p) * (epoch * (p - 1) / warmup + 1).
        expected = lr * (step / steps * (num_ranks - 1) / warmup + 1)
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)
    assert [round(float(schedule(steps * epoch)) / peak, 6) for epoch in (5, 7.9, 8, 30)] == [
        1,
        1,
        0.1,
        0.1,
    ]


@pytest.mark.parametrize(("scaling", "rate"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_scaled_rate(scaling, rate):
    assert course.scaled_rate(0.1, scaling, 4) == pytest.approx(rate)


CONFIGS = sorted((EXAMPLES / "cifar10" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_valid_and_builds_its_model(path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = configuration.load(path)
    module = course.make_module(config["model"])
    size = 64 if config["data"]["name"] in ("dummy", "folders") else 32
    shapes = jax.eval_shape(
        lambda: module.init(jax.random.key(0), jnp.zeros((1, size, size, 3)), train=False)
    )
    assert shapes["params"]["classifier"]["bias"].shape == (config["model"]["num_classes"],)
    course.make_optimizer(config["optimizer"], config["training"], steps_per_epoch=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.lrr=1"], r"no key 'lrr'\. Did you mean 'lr'"),
        (["trainig.n_epochs=1"], r"no key 'trainig'\. Did you mean 'training'"),
        (
            ["optimizer.lr=1e-4"],
            r"optimizer.lr must be a number, but is '1e-4'\. Write a decimal point",
        ),
        (
            ["optimizer.lr_scaling=cubic"],
            "lr_scaling must be one of linear, sqrt, none, but is 'cubic'",
        ),
        (["training.lr_schedule=[{begin: 3}]"], r"no key 'begin'"),
        (
            ["output_dir=$NOT_SET_ANYWHERE/x"],
            "still has a variable that the environment does not set",
        ),
        (["lr"], "must read section.key=value, but is 'lr'"),
    ],
)
def test_wrong_configurations_are_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        configuration.load(EXAMPLES / "cifar10" / "configs" / "hello.yaml", changes)


def test_an_unknown_model_or_attribute_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"There is no model 'resnet_smal'\. Did you mean 'resnet_small'"
    ):
        course.make_module({"name": "resnet_smal"})
    with pytest.raises(ValueError, match=r"no key 'num_clases'\. Did you mean 'num_classes'"):
        course.make_module({"name": "cnn", "num_clases": 10})


def numpy_token_loss(labels, logits, smoothing):
    """The tutorial's loss, with the smoothed distribution written out."""
    vocab_size = logits.shape[-1]
    target = np.full(logits.shape, smoothing / (vocab_size - 1))
    np.put_along_axis(target, labels[..., None], 1 - smoothing, axis=-1)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    values = -(target * log_probs).sum(-1) + (target * np.log(target)).sum(-1)
    real = labels != 0
    return (values * real).sum() / real.sum()


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_token_loss_equals_its_formula(smoothing):
    rng = np.random.default_rng(0)
    labels, logits = np.array([[3, 1, 0], [2, 4, 1]]), rng.normal(size=(2, 3, 5))
    loss = translation_training.LabelSmoothedCrossentropy(smoothing)
    expected = numpy_token_loss(labels, logits, smoothing)
    np.testing.assert_allclose(
        loss(jnp.array(labels), jnp.array(logits, jnp.float32)), expected, rtol=1e-5
    )
    parts = [
        loss.terms(jnp.array(labels[i : i + 1]), jnp.array(logits[i : i + 1], jnp.float32))
        for i in range(2)
    ]
    np.testing.assert_allclose(
        sum(t for t, _ in parts) / sum(c for _, c in parts), expected, rtol=1e-5
    )


def test_token_loss_of_a_perfect_model_is_zero():
    labels = jnp.array([[3, 1]])
    log_target = jnp.log(jnp.where(jax.nn.one_hot(labels, 5) == 1, 0.9, 0.1 / 4))
    np.testing.assert_allclose(
        translation_training.LabelSmoothedCrossentropy(0.1)(labels, log_target), 0, atol=1e-6
    )


def test_token_accuracy_counts_real_tokens_of_real_rows():
    metric = translation_training.TokenAccuracy()
    labels = jnp.array([[3, 1, 0], [2, 4, 1], [2, 2, 2]])
    logits = jax.nn.one_hot(jnp.array([[3, 2, 0], [2, 4, 1], [2, 2, 2]]), 5)
    sums = metric.increments(labels, logits, weight=jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(metric.compute(sums), 4 / 5, rtol=1e-6)


@pytest.mark.parametrize("process_count", [1, 3, 4])
def test_shards_by_hand_hold_each_pair_of_a_global_batch_once(process_count):
    pairs = TokenPairs(
        [np.array([n + 2, 1]) for n in range(23)], [np.array([n + 2, 5, 1]) for n in range(23)]
    )
    shards = [
        translation_data.OwnShard(
            pairs, rows_per_batch=7, length=4, process_index=i, process_count=process_count, seed=1
        )
        for i in range(process_count)
    ]
    seen = []
    for batches in zip(*shards, strict=True):
        assert sum(len(targets) for _, targets in batches) == 7
        for (sources, targets), labels in batches:
            assert sources.shape[1] == 4
            np.testing.assert_array_equal(targets, labels)
            np.testing.assert_array_equal(sources[:, 0], targets[:, 0])
            seen += sources[:, 0].tolist()
    assert len(seen) == len(set(seen)) == 21


def test_shards_by_hand_refuse_more_processes_than_pairs():
    pairs = TokenPairs([np.array([2, 1])] * 9, [np.array([2, 1])] * 9)
    with pytest.raises(ValueError, match="3 pairs cannot be shared by 4 processes"):
        translation_data.OwnShard(
            pairs, rows_per_batch=3, length=4, process_index=0, process_count=4, seed=1
        )


def test_equal_texts_never_stand_on_two_sides():
    rows = [(f"text {number % 50}", str(number % 2)) for number in range(200)]
    parts = text_classification.split_rows({"all": rows}, seed=0)
    texts = [{text for text, _ in part} for part in parts.values()]
    assert sum(map(len, texts)) == 50
    assert sum(map(len, parts.values())) == 200
    assert all(texts)


def test_the_custom_loop_of_the_lesson_trains_on_two_devices_as_fit_on_one(
    tmp_path, monkeypatch, capsys, use_ranks
):
    random = np.random.default_rng(0)
    data = [
        (random.integers(1, 30, (37, 6)).astype(np.int32), random.integers(0, 2, 37)) for _ in "tve"
    ]
    words = ["script.py", "--data", "none", "--epochs", "3", "--patience", "0"]
    results = {}
    for num_ranks, more in ((2, ["--custom_loop"]), (1, [])):
        use_ranks(num_ranks)
        picture = tmp_path / f"{num_ranks}.png"
        more += ["--micro_batch_size", str(16 // num_ranks), "--plot", str(picture)]
        monkeypatch.setattr(sys, "argv", [*words, *more])
        args = text_classification.parse_args()
        module = text_classification.make_module(args, 2, 30)
        if not args.custom_loop:
            results["fit"] = text_classification.fit(args, module, *data)
            continue
        # The first weights of `fit`.
        model = text_classification.compile_model(args, module)
        model.build(data[0][0])
        first = {"params": jax.tree.map(np.array, model.variables["params"])}
        monkeypatch.setattr(type(module), "init", lambda *_, first=first, **__: first)
        results["loop"] = text_classification.custom_loop(args, module, *data)
        monkeypatch.undo()
        assert picture.stat().st_size > 5000
    lines = capsys.readouterr().out.splitlines()
    number = r"\d\.\d{4}, (?:Valid )?Accuracy: \d+\.\d\d%"
    for epoch, line in enumerate(lines[:3], 1):
        assert re.fullmatch(f"Epoch {epoch}, Loss: {number}, Valid Loss: {number}", line)
    assert lines[4].split() == ["epochs", "train_loss", "train_acc", "valid_loss", "valid_acc"]
    assert [line.split()[0] for line in lines[5:8]] == ["1", "2", "3"]
    np.testing.assert_allclose(results["loop"][1:], results["fit"][1:], rtol=1e-4)
