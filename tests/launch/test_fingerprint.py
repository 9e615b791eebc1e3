"""Fingerprint files, their comparison, and the seeds."""

import json
import logging
import random

import flax.linen as nn
import numpy as np
import optax
import pytest

import tnt_jax as tnt
from tnt_jax.job import Slot
from tnt_jax.launch.command import main
from tnt_jax.launch.planning.fingerprint import fingerprint_line, first_difference


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


def write(path, *records):
    path.write_text("".join(fingerprint_line(*record) for record in records))
    return path


def train(path, *, learning_rate=0.1, seed=1, epochs=2, every=None):
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    model = tnt.Model(Mlp(), seed=seed)
    model.compile(optimizer=optax.sgd(learning_rate), loss="mse")
    model.fit(
        x,
        x[:, :2],
        batch_size=16,
        epochs=epochs,
        verbose=0,
        callbacks=[tnt.callbacks.Fingerprint(path, every=every)],
    )
    return path


def test_two_runs_have_the_same_fingerprint(tmp_path, capsys):
    first, second = train(tmp_path / "a", every=1), train(tmp_path / "b", every=1)
    assert main(["fingerprint", str(first), str(second)]) == 0
    assert capsys.readouterr().out == "equal\n"


def test_the_first_step_and_array_that_differ_are_named(tmp_path, capsys):
    first, second = (
        train(tmp_path / "a", every=1),
        train(tmp_path / "b", every=1, learning_rate=0.2),
    )
    assert main(["fingerprint", str(first), str(second)]) == 1
    assert (
        capsys.readouterr().out
        == "first difference at step 1 (epoch 1): params/Dense_0/bias, params/Dense_0/kernel\n"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([(0, 1, {"a": "x"})], [(0, 1, {"a": "x"}), (0, 2, {"a": "y"})], None),
        ([(0, 1, {"a": "x"}), (1, 2, {"a": "x"})], [(1, 2, {"a": "y"})], "step 2 (epoch 2): a"),
        ([(0, 1, {"a": "x"})], [(0, 1, {"a": "x", "b": "z"})], "step 1 (epoch 1): b"),
        ([(0, 1, {"a": "x"})], [(1, 1, {"a": "x"})], "step 1 (epoch 1): the epoch"),
    ],
)
def test_first_difference(ours, theirs, expected, tmp_path):
    assert (
        first_difference(write(tmp_path / "a", *ours), write(tmp_path / "b", *theirs)) == expected
    )


def test_files_that_cannot_be_compared_are_refused(tmp_path, capsys):
    good, other = write(tmp_path / "a", (0, 1, {})), write(tmp_path / "b", (0, 2, {}))
    with pytest.raises(ValueError, match="no step in common: steps 1 to 1 and steps 2 to 2"):
        first_difference(good, other)
    (tmp_path / "c").write_text("epoch 1\n")
    with pytest.raises(ValueError, match="line 1, is not a line of a fingerprint file"):
        first_difference(good, tmp_path / "c")
    assert main(["fingerprint", str(good)]) == 2


def test_set_seed_seeds_all_and_models_without_a_seed(monkeypatch, caplog):
    monkeypatch.setattr("tnt_jax.seeding._seed", Slot(lambda: None))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(logging.getLogger("tnt_jax"), "propagate", True)
    draws = []
    assert tnt.Model(Mlp()).options["seed"] == 0
    for _ in range(2):
        with caplog.at_level("INFO", logger="tnt_jax"):
            tnt.set_seed(5)
        draws.append((random.random(), np.random.rand()))
    assert draws[0] == draws[1]
    assert tnt.Model(Mlp()).options["seed"] == 5
    assert tnt.Model(Mlp(), seed=7).options["seed"] == 7
    assert "numpy" in caplog.text
    assert "PYTHONHASHSEED" in caplog.text


def test_a_seed_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*32 - 1, but is -1"):
        tnt.set_seed(-1)


def test_a_group_of_steps_that_passes_the_number_of_steps_is_written(tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    model = tnt.Model(Mlp())
    model.compile("sgd", loss="mse", steps_per_execution=2)
    digests = tnt.callbacks.Fingerprint(tmp_path / "digests", every=3)
    model.fit(x, x[:, :2], batch_size=8, epochs=1, verbose=0, callbacks=[digests])
    lines = (tmp_path / "digests").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 6, 8]
