"""The parts of the examples that are formulas or checks, and every example shrunken, in two processes."""

import gzip
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_images import write_images

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "cifar10")]

import configuration  # noqa: E402
import learning_rates  # noqa: E402
import text_classification  # noqa: E402
import train as course  # noqa: E402
import translation_data  # noqa: E402
import translation_training  # noqa: E402

from tnt_jax.data.text import TokenPairs  # noqa: E402


@pytest.mark.parametrize(
    ("epoch", "rate"),
    # 0.1 * 512 / 256 after five epochs of warm-up, divided by ten after 30, 60 and 80 epochs.
    [(0, 0.0), (2.5, 0.1), (5, 0.2), (29.9, 0.2), (30, 0.02), (60, 0.002), (79.9, 0.002), (80, 0.0002), (89, 0.0002)],
)
def test_warmup_and_steps_are_goyals(epoch, rate):
    schedule = learning_rates.WarmupSteps(0.1 * 512 / 256, steps_per_epoch=10)
    np.testing.assert_allclose(jax.jit(schedule)(round(10 * epoch)), rate, rtol=1e-5, atol=1e-9)


def test_steps_need_one_multiplier_more_than_boundaries():
    with pytest.raises(ValueError, match="one multiplier more than boundaries"):
        learning_rates.WarmupSteps(0.1, steps_per_epoch=10, boundaries=(1, 2), multipliers=(1.0, 0.1))


@pytest.mark.parametrize(("epoch", "rate"), [(1, 0.02), (5, 0.1 * 0.97 ** (5 / 2.4)), (24, 0.1 * 0.97**10)])
def test_exponential_decay_counts_from_the_first_epoch(epoch, rate):
    schedule = learning_rates.WarmupExponential(0.1, steps_per_epoch=7)
    np.testing.assert_allclose(schedule(7 * epoch), rate, rtol=1e-5)


def test_inverse_square_root_equals_the_papers_formula():
    schedule = learning_rates.InverseSquareRoot(2.0, width=512, warmup_steps=4000)
    for step in (1, 100, 4000, 4001, 100_000):
        # Vaswani et al. 2017, eq. 3: d^-0.5 * min(step^-0.5, step * warmup^-1.5).
        expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        np.testing.assert_allclose(schedule(step - 1), expected, rtol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_course_schedule_warms_up_as_horovod_does(num_ranks):
    lr, warmup, steps = 0.01, 5, 20
    parts = [{"start_epoch": 5, "end_epoch": 8, "multiplier": 1.0}, {"start_epoch": 8, "multiplier": 0.1}]
    peak = course.scaled_rate(lr, "linear", num_ranks)
    schedule = course.CourseSchedule(lr, peak, steps_per_epoch=steps, warmup_epochs=warmup, parts=parts)
    for step in (0, 7, 50, 99):
        # Horovod's LearningRateWarmupCallback: lr * p * (1 / p) * (epoch * (p - 1) / warmup + 1).
        expected = lr * (step / steps * (num_ranks - 1) / warmup + 1)
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)
    assert [round(float(schedule(steps * epoch)) / peak, 6) for epoch in (5, 7.9, 8, 30)] == [1, 1, 0.1, 0.1]


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
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, size, size, 3)), train=False))
    assert shapes["params"]["classifier"]["bias"].shape == (config["model"]["num_classes"],)
    course.make_optimizer(config["optimizer"], config["training"], steps_per_epoch=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.lrr=1"], r"no key 'lrr'\. Did you mean 'lr'"),
        (["trainig.n_epochs=1"], r"no key 'trainig'\. Did you mean 'training'"),
        (["optimizer.lr=1e-4"], r"optimizer.lr must be a number, but is '1e-4'\. Write a decimal point"),
        (["optimizer.lr_scaling=cubic"], "lr_scaling must be one of linear, sqrt, none, but is 'cubic'"),
        (["training.lr_schedule=[{begin: 3}]"], r"no key 'begin'"),
        (["output_dir=$NOT_SET_ANYWHERE/x"], "still has a variable that the environment does not set"),
        (["lr"], "must read section.key=value, but is 'lr'"),
    ],
)
def test_wrong_configurations_are_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        configuration.load(EXAMPLES / "cifar10" / "configs" / "hello.yaml", changes)


def test_an_unknown_model_or_attribute_names_the_nearest():
    with pytest.raises(ValueError, match=r"There is no model 'resnet_smal'\. Did you mean 'resnet_small'"):
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
    np.testing.assert_allclose(loss(jnp.array(labels), jnp.array(logits, jnp.float32)), expected, rtol=1e-5)
    parts = [loss.terms(jnp.array(labels[i : i + 1]), jnp.array(logits[i : i + 1], jnp.float32)) for i in range(2)]
    np.testing.assert_allclose(sum(t for t, _ in parts) / sum(c for _, c in parts), expected, rtol=1e-5)


def test_token_loss_of_a_perfect_model_is_zero():
    labels = jnp.array([[3, 1]])
    log_target = jnp.log(jnp.where(jax.nn.one_hot(labels, 5) == 1, 0.9, 0.1 / 4))
    np.testing.assert_allclose(translation_training.LabelSmoothedCrossentropy(0.1)(labels, log_target), 0, atol=1e-6)


def test_token_accuracy_counts_real_tokens_of_real_rows():
    metric = translation_training.TokenAccuracy()
    labels = jnp.array([[3, 1, 0], [2, 4, 1], [2, 2, 2]])
    logits = jax.nn.one_hot(jnp.array([[3, 2, 0], [2, 4, 1], [2, 2, 2]]), 5)
    sums = metric.increments(labels, logits, weight=jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(metric.compute(sums), 4 / 5, rtol=1e-6)


@pytest.mark.parametrize("process_count", [1, 3, 4])
def test_shards_by_hand_hold_each_pair_of_a_global_batch_once(process_count):
    pairs = TokenPairs([np.array([n + 2, 1]) for n in range(23)], [np.array([n + 2, 5, 1]) for n in range(23)])
    shards = [
        translation_data.OwnShard(pairs, rows_per_batch=7, length=4, process_index=i, process_count=process_count, seed=1)
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
        translation_data.OwnShard(pairs, rows_per_batch=3, length=4, process_index=0, process_count=4, seed=1)


def test_equal_texts_never_stand_on_two_sides():
    rows = [(f"text {number % 50}", str(number % 2)) for number in range(200)]
    parts = text_classification.split_rows({"all": rows}, seed=0)
    texts = [{text for text, _ in part} for part in parts.values()]
    assert sum(map(len, texts)) == 50
    assert sum(map(len, parts.values())) == 200
    assert all(texts)


def run(*command, num_processes=0, timeout_s=300):
    """Runs an example, by the launcher if `num_processes` is not 0."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC") and not k.startswith("TNT_")}
    starter = (
        [sys.executable, "-m", "tnt_jax.launch", "-n", str(num_processes), "--no-gpu", "--"]
        if num_processes
        else [sys.executable]
    )
    paths = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = [str(EXAMPLES / command[0]), *map(str, command[1:])]
    return subprocess.run([*starter, *words], capture_output=True, text=True, timeout=timeout_s, env=kept | paths)


def succeed(*command, num_processes=2):
    done = run(*command, num_processes=num_processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_idx(folder):
    """Writes a small image set in the format of MNIST."""
    rng = np.random.default_rng(0)
    for prefix, size in (("train", 70), ("t10k", 30)):
        labels = np.arange(size) % 2
        images = rng.integers(0, 50, (size, 12, 12)) + 150 * labels[:, None, None]
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_texts(folder):
    """Writes a corpus of pairs that can be translated word by word, and a test set."""
    words = {"red": "rot", "blue": "blau", "big": "gross", "small": "klein", "dog": "Hund", "cat": "Katze", "house": "Haus"}
    english = [f"the {a} {b} {n}" for a in ("big", "small") for b in ("red", "blue") for n in ("dog", "cat", "house")] * 8
    german = [" ".join(["das", *(words[word] for word in line.split()[1:])]) for line in english]
    folder.mkdir()
    (folder / "train.tsv").write_text("".join(f"{e}\t{g}\n" for e, g in zip(english, german, strict=True)))
    (folder / "test.en").write_text("".join(f"{line}\n" for line in english[:7]))
    (folder / "test.de").write_text("".join(f"{line}\n" for line in german[:7]))


SMALL_TRANSFORMER = (
    "--param_set",
    "tiny",
    "--num_layers",
    "1",
    "--vocab_size",
    "60",
    "--max_length",
    "24",
    "--batch_size",
    "192",
)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_text_classification_learns_in_two_processes(tmp_path):
    lines = [f"{'spam' if n % 3 == 0 else 'ham'}\t{'win money' if n % 3 == 0 else 'see you'} number {n}" for n in range(300)]
    (tmp_path / "texts.tsv").write_text("\n".join(lines) + "\n")
    for _ in range(2):
        screen = succeed(
            "text_classification.py", "--data", tmp_path / "texts.tsv", "--epochs", "6", "--micro_batch_size", "8",
            "--timings", tmp_path / "times.json",
        )  # fmt: skip
    assert "test accuracy: 1.0000" in screen
    assert "on 2 device(s)" in screen
    assert [run["devices"] for run in json.loads((tmp_path / "times.json").read_text())] == [2, 2]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_course_training_writes_its_history_in_two_processes(tmp_path):
    write_idx(tmp_path)
    screen = succeed(
        "cifar10/train.py", EXAMPLES / "cifar10" / "configs" / "fashion_resnet20.yaml", f"data.data_dir={tmp_path}",
        "--n_epochs", "4", "--batch_size", "8", "model={name: cnn, num_classes: 10}", "optimizer={name: Adam, lr: 0.01}",
        f"output_dir={tmp_path}/out", "--optimizer", "lr_scaling=none",
    )  # fmt: skip
    history = np.load(tmp_path / "out" / "history.npz")
    assert history["n_ranks"] == 2
    assert len(history["val_accuracy"]) == 4
    assert history["val_accuracy"].max() > 0.9
    assert f"Best val_accuracy: {history['val_accuracy'].max():.4f}" in screen
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 4


@pytest.mark.slow
@pytest.mark.multiprocess
def test_resnet_trains_on_class_folders_in_two_processes(tmp_path):
    write_images(tmp_path)
    screen = succeed(
        "resnet50.py", "--data_dir", tmp_path, "--model", "resnet18", "--num_classes", "2", "--image_size", "32", "--batch_size", "6",
        "--train_epochs", "1", "--warmup_epochs", "0.5", "--base_learning_rate", "0.4",
    )  # fmt: skip
    assert "Validation: top-1" in screen
    assert "on 2 device(s)" in screen


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by_hand"])
def test_transformer_translates_in_two_processes(tmp_path, by_hand):
    write_texts(tmp_path / "data")
    screen = succeed(
        "transformer.py", "--data_dir", tmp_path / "data", "--model_dir", tmp_path / "model", *SMALL_TRANSFORMER,
        "--bleu_source", tmp_path / "data" / "test.en", "--bleu_ref", tmp_path / "data" / "test.de", "--train_epochs", "2",
        "--epochs_between_evals", "2", "--average_last", "2", "--extra_decode_length", "4", "--no-enable_checkpointing",
        "--auto_data_dist" if not by_hand else "--no-auto_data_dist", "--translations", tmp_path / "out.txt",
    )  # fmt: skip
    assert "BLEU cased = " in screen
    assert "case:lc" in screen
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 7


@pytest.mark.slow
@pytest.mark.multiprocess
def test_keras_model_trains_in_two_processes():
    screen = succeed("keras_resnet.py", "--epochs", "3")
    shown = screen.splitlines()[-1].replace(";", "").split()
    assert shown[2] == shown[-1]
    assert float(shown[2]) > 0.4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("resnet50.py", "--data_dir", "EMPTY"), "looked for train-.-of-.* .TFRecords., for the folders train"),
        (("resnet50.py", "--data_dir", "EMPTY/none"), "--data_dir must be a folder of images"),
        (("text_classification.py", "--data", "EMPTY/none"), "There is no file"),
        (("cifar10/train.py", "HELLO", "model.name=cnnn"), "There is no model 'cnnn'. Did you mean 'cnn'"),
        (("transformer.py", "--data_dir", "EMPTY", "--vocab_file", "none"), "There is no vocabulary none"),
        (("transformer.py", "--data_dir", "EMPTY", "--model_dir", "EMPTY"), r"looked for \*train\*.tsv"),
        (("transformer.py", "--synthetic_data", "--bleu_ref", "x"), "must be given together"),
        (("transformer.py", "--synthetic_data", "--batch_size", "100"), r"--batch_size \(100 tokens\) must hold one sentence"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_wrong_input_is_explained(tmp_path, command, message):
    hello = str(EXAMPLES / "cifar10" / "configs" / "hello.yaml")
    done = run(*(word.replace("EMPTY", str(tmp_path)).replace("HELLO", hello) for word in command))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_test_files_of_different_length_are_explained(tmp_path):
    write_texts(tmp_path / "data")
    (tmp_path / "data" / "test.de").write_text("one line\n")
    done = run(
        "transformer.py", "--data_dir", tmp_path / "data", "--model_dir", tmp_path, *SMALL_TRANSFORMER,
        "--bleu_source", tmp_path / "data" / "test.en", "--bleu_ref", tmp_path / "data" / "test.de",
    )  # fmt: skip
    assert done.returncode != 0
    assert "has 7 lines" in done.stderr
    assert "Traceback" not in done.stderr


def test_bleu_of_equal_texts_is_100_and_its_signature_is_printed():
    pytest.importorskip("sacrebleu")
    lines = ["Das ist ein kleines Haus am See .", "Der Hund liegt unter dem grossen Tisch ."]
    scores = translation_data.bleu_scores(lines, [line.upper() for line in lines])
    assert [name for name, _, _ in scores] == ["BLEU cased", "BLEU uncased"]
    # Only the full stops are equal with their case.
    assert scores[0][1] < 5
    assert math.isclose(scores[1][1], 100)
    assert "case:lc" in scores[1][2]
    assert math.isclose(translation_data.bleu_scores(lines, lines)[0][1], 100)
