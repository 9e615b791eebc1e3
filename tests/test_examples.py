"""Every example shrunken, in two processes, and what it says to wrong input."""

import gzip
import json
import math
import os
import re

import numpy as np
import pytest
from example_images import write_images
from example_modules import EXAMPLES, ROOT
from processes import SCRIPTS, launch
from token_files import write_records, write_vocabulary

import translation_data  # isort: skip
from subtokens import SubtokenVocabulary  # isort: skip


def run(*command, num_processes=0, timeout_s=300):
    """Runs an example, by the launcher if `num_processes` is not 0."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    example = EXAMPLES / command[0]
    return launch(num_processes, example, *command[1:], timeout_s=timeout_s, PYTHONPATH=paths)


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
            (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(
                gzip.compress(header + array.astype(np.uint8).tobytes())
            )


def write_texts(folder):
    """Writes a corpus of pairs that can be translated word by word, and a test set."""
    words = {
        "red": "rot",
        "blue": "blau",
        "big": "gross",
        "small": "klein",
        "dog": "Hund",
        "cat": "Katze",
        "house": "Haus",
    }
    english = [
        f"the {a} {b} {n}"
        for a in ("big", "small")
        for b in ("red", "blue")
        for n in ("dog", "cat", "house")
    ] * 8
    german = [" ".join(["das", *(words[word] for word in line.split()[1:])]) for line in english]
    folder.mkdir()
    (folder / "train.tsv").write_text(
        "".join(f"{e}\t{g}\n" for e, g in zip(english, german, strict=True))
    )
    (folder / "test.en").write_text("".join(f"{line}\n" for line in english[:7]))
    (folder / "test.de").write_text("".join(f"{line}\n" for line in german[:7]))


def write_tokens(folder):
    """Puts token files and their vocabulary in place of the texts; returns the vocabulary."""
    pairs = [line.split("\t") for line in (folder / "train.tsv").read_text().splitlines()]
    (folder / "train.tsv").unlink()
    words = sorted({word for pair in pairs for text in pair for word in text.split()})
    file = write_vocabulary(folder / "vocab.ende.32768", words, "")
    encoded = [map(list, SubtokenVocabulary(file).encode(pair)) for pair in pairs]
    examples = [dict(zip(("inputs", "targets"), pair, strict=True)) for pair in encoded]
    write_records(folder / "wmt32k-train-00001-of-00002", examples[:50])
    write_records(folder / "wmt32k-train-00002-of-00002", examples[50:])
    return file


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


@pytest.mark.long  # The example itself runs in one; others run in two.
@pytest.mark.slow
@pytest.mark.multiprocess
def test_text_classification_learns_in_two_processes(tmp_path):
    lines = [
        f"{'spam' if n % 3 == 0 else 'ham'}\t{'win money' if n % 3 == 0 else 'see you'} number {n}"
        for n in range(300)
    ]
    (tmp_path / "texts.tsv").write_text("\n".join(lines) + "\n")
    times = tmp_path / "times.json"
    before = {"devices": 1, "epochs": 6, "seconds": 2.0, "examples": 6 * 242}
    times.write_text(json.dumps([before]))
    screen = succeed(
        "text_classification.py", "--data", tmp_path / "texts.tsv", "--epochs", "6",
        "--micro_batch_size", "8", "--timings", times,
    )  # fmt: skip
    assert "test accuracy: 1.0000" in screen
    assert "on 2 device(s)" in screen
    first, second = json.loads(times.read_text())
    assert first == before
    assert (second["devices"], second["examples"]) == (2, 6 * 242)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.long
def test_course_training_writes_its_history_in_two_processes(tmp_path):
    write_idx(tmp_path)
    screen = succeed(
        "cifar10/train.py", EXAMPLES / "cifar10" / "configs" / "fashion_resnet20.yaml",
        f"data.data_dir={tmp_path}",
        "--n_epochs", "4", "--batch_size", "8", "model={name: cnn, num_classes: 10}",
        "optimizer={name: Adam, lr: 0.01}",
        f"output_dir={tmp_path}/out", "--optimizer", "lr_scaling=none",
    )  # fmt: skip
    history = np.load(tmp_path / "out" / "history.npz")
    assert history["n_ranks"] == 2
    assert len(history["val_accuracy"]) == 4
    assert history["val_accuracy"].max() > 0.9
    assert f"Best val_accuracy: {history['val_accuracy'].max():.4f}" in screen
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 4


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_resnet_trains_on_class_folders_in_two_processes(tmp_path):
    write_images(tmp_path)
    screen = succeed(
        "resnet50.py", "--data_dir", tmp_path, "--model", "resnet18", "--num_classes", "2",
        "--image_size", "32", "--batch_size", "6",
        "--train_epochs", "1", "--warmup_epochs", "0.5", "--base_learning_rate", "0.4",
    )  # fmt: skip
    assert "Validation: top-1" in screen
    assert "on 2 device(s)" in screen


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by_hand"])
def test_transformer_translates_in_two_processes(tmp_path, by_hand):
    write_texts(tmp_path / "data")
    vocabulary = ["--vocab_file", write_tokens(tmp_path / "data")] if by_hand else []
    screen = succeed(
        "transformer.py", "--data_dir", tmp_path / "data", "--model_dir", tmp_path / "model",
        *SMALL_TRANSFORMER, *vocabulary,
        "--bleu_source", tmp_path / "data" / "test.en", "--bleu_ref", tmp_path / "data" / "test.de",
        "--train_epochs", "2",
        "--epochs_between_evals", "2", "--average_last", "2", "--extra_decode_length", "4",
        "--no-enable_checkpointing",
        "--auto_data_dist" if not by_hand else "--no-auto_data_dist", "--translations",
        tmp_path / "out.txt",
    )  # fmt: skip
    assert "BLEU cased = " in screen
    assert "case:lc" in screen
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 7


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_keras_model_trains_in_two_processes():
    screen = succeed("keras_resnet.py", "--epochs", "3")
    shown = screen.splitlines()[-1].replace(";", "").split()
    assert shown[2] == shown[-1]
    assert float(shown[2]) > 0.4


HELLO = str(EXAMPLES / "cifar10" / "configs" / "hello.yaml")
WRONG_INPUT = [
    (
        ("resnet50.py", "--data_dir", "EMPTY"),
        "looked for train-.-of-.* .TFRecords., for the folders train",
    ),
    (("resnet50.py", "--data_dir", "EMPTY/none"), "--data_dir must be a folder of images"),
    (("text_classification.py", "--data", "EMPTY/none"), "There is no file"),
    (("cifar10/train.py", HELLO, "model.name=cnnn"), "There is no model 'cnnn'. Did you mean 'cnn'"),
    (
        ("transformer.py", "--data_dir", "EMPTY", "--vocab_file", "none"),
        "There is no vocabulary none",
    ),
    (
        ("transformer.py", "--data_dir", "EMPTY", "--model_dir", "EMPTY"),
        r"looked for \*train\*.tsv",
    ),
    (("transformer.py", "--synthetic_data", "--bleu_ref", "x"), "must be given together"),
    (
        ("transformer.py", "--synthetic_data", "--batch_size", "100"),
        r"--batch_size \(100 tokens\) must hold one sentence",
    ),
    (
        (
            "transformer.py", "--data_dir", "TEXTS", "--model_dir", "EMPTY", *SMALL_TRANSFORMER,
            "--bleu_source", "TEXTS/test.en", "--bleu_ref", "TEXTS/test.de",
        ),
        "has 7 lines",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Exit code and last words of each command, all of one process."""
    empty, texts = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("texts") / "data"
    write_texts(texts)
    (texts / "test.de").write_text("one line\n")  # The other language has 7.
    folders = {"EMPTY": str(empty), "TEXTS": str(texts)}
    commands = []
    for command, _ in WRONG_INPUT:
        words = [str(EXAMPLES / command[0]), *command[1:]]
        for name, folder in folders.items():
            words = [word.replace(name, folder) for word in words]
        commands.append(words)
    done = run(SCRIPTS / "refuse_input.py", json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(WRONG_INPUT)))
def test_wrong_input_is_explained(number, refusals):
    (code, errors), message = refusals[number], WRONG_INPUT[number][1]
    assert code != 0
    assert "Traceback" not in errors
    assert re.search(message, errors), errors


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


@pytest.mark.long
def test_optuna_search_tells_the_best_trial_and_its_accuracy(tmp_path):
    pytest.importorskip("optuna", reason="needs the extra optuna")
    command = ["optuna_search.py", "--trials", 2, "--epochs", 2]
    shown = succeed(*command, "--storage", f"sqlite:///{tmp_path}/digits.db", num_processes=0)
    assert re.search(r"trial \d was the best: {'learning_rate': 0\.\d+, 'units': \d+", shown)
    assert re.search(r"validation accuracy: 0\.\d+, test accuracy: 0\.\d+", shown)
