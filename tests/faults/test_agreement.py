"""Processes that disagree: one error on all of them that names what, who and both values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax.distributed.host.comparison import describe_differences
from tnt_jax.keras_compat.fit.start_check import describe_compilation, describe_model
from tnt_jax.train.health.state_checksums import (
    checksum,
    checksum_program,
    local_checksums,
    replicated_arrays,
    replicated_paths,
)
from tnt_jax.train.state import create_state

RNG = np.random.default_rng(0)


@pytest.mark.multiprocess
def test_what_differs_is_one_error_on_all_and_a_stop_is_agreed():
    done = launch(2, SCRIPTS / "disagree.py", flags=["--output-on-all-devices"], timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("36 cases and 6 stops") == 2


@pytest.mark.parametrize(
    ("told", "groups", "expected"),
    [
        ([{"a": "1"}, {"a": "1"}], None, ""),
        ([{"a": "1", "b": "2"}, {"a": "3", "b": "2"}], None, "a: 1 on process 0, 3 on process 1"),
        ([{"a": "1"}, {}], None, "a: 1 on process 0, nothing on process 1"),
        ([{"a": "1"}, {"a": "2"}], [[0, 2, 3], [1]], "a: 1 on processes 0, 2, 3, 2 on process 1"),
        ([{"a": "1", "b": "0"}, {"a": "2", "b": "0"}, {"a": "1", "b": "5"}], None, "a: 1 on processes 0, 2, 2 on process 1; b: 0 on processes 0, 1, 5 on process 2"),
    ],
)  # fmt: skip
def test_each_difference_is_told_with_its_processes(told, groups, expected):
    assert describe_differences(told, groups) == expected


def test_settings_of_keras_objects_that_differ_are_told():
    import keras

    def told(beta_1, dtype):
        layers = [keras.Input((4,)), keras.layers.Dense(1, dtype=dtype)]
        model = tnt.Model(keras.Sequential(layers))
        model.compile(keras.optimizers.Lion(0.1, beta_1=beta_1), loss="mse")
        core = model.training_state._core
        return describe_model(core) | describe_compilation(core, core.compilation)

    text = describe_differences([told(0.9, "float32"), told(0.8, "mixed_bfloat16")])
    assert "optimizer.beta_1: 0.9 on process 0, 0.8 on process 1" in text
    assert "mixed_bfloat16 on process 1" in text


def test_of_long_values_the_part_that_differs_is_told():
    text = describe_differences([{"a": "x" * 500 + "0" + "x" * 500}, {"a": "x" * 1001}])
    assert "x0x" in text
    assert len(text) < 400


def of_every_dtype():
    """Returns arrays of each width, kind and rank, one of them empty."""
    shapes = {"float32": (3, 5), "bfloat16": (7,), "float16": (2, 2), "int8": (3,), "uint32": ()}
    arrays = [RNG.integers(0, 100, shape).astype(name) for name, shape in shapes.items()]
    others = [np.ones(3, bool), np.ones((0, 4), np.float32), np.ones(2, np.complex64)]
    return [jnp.asarray(x) for x in arrays + others]


@pytest.mark.parametrize("array", of_every_dtype(), ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_every_flipped_bit_changes_the_checksum(array):
    host, of = np.asarray(array), jax.jit(checksum)
    sums = [int(of(array))]
    for bit in range(0, host.nbytes * 8, 8 if host.dtype == bool else 1):
        data = bytearray(host.tobytes())
        data[bit // 8] ^= 1 << bit % 8
        flipped = np.frombuffer(bytes(data), host.dtype).reshape(host.shape)
        sums.append(int(of(jnp.asarray(flipped))))
    assert len(set(sums)) == len(sums)


def test_exchanged_elements_and_several_signs_change_the_checksum():
    x, of = np.arange(1000, dtype=np.float32), jax.jit(checksum)
    zeros = [np.where(np.arange(1000) < 2 * number, -0.0, 0.0) for number in range(50)]
    others = [np.roll(x, shift) for shift in range(50)] + [y.astype(np.float32) for y in zeros]
    assert len({int(of(jnp.asarray(y))) for y in others}) == 100


def mixed(words):
    """Returns the checksum of words, by Python's integers."""
    total = 0
    for place, word in enumerate(words):
        mix = int(word) ^ (place * 2654435761 & 0xFFFFFFFF)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mix = (mix ^ mix >> shift) * factor & 0xFFFFFFFF
        total += mix ^ mix >> 16
    return total & 0xFFFFFFFF


def test_the_checksum_is_the_published_mixture_of_each_word_and_its_place():
    words = RNG.integers(0, 2**32, 50, dtype=np.uint32)
    assert int(jax.jit(checksum)(jnp.asarray(words))) == mixed(words)


def test_what_each_rank_has_for_itself_is_left_out(four_ranks):
    mesh = tnt.init().mesh
    whole = _jax.replicate({"a": np.ones(4), "b": np.ones(8)}, mesh)
    parts = jax.device_put(np.ones(8), jax.NamedSharding(mesh, jax.P("data")))
    state = create_state(whole, {}, optax.identity(), seed=0)
    step, key = _jax.replicate((state.step, state.key), mesh)
    state = replace(state, step=step, key=key, opt_state=parts, accumulated=whole, residual=whole)
    assert replicated_paths(state) == ["step", "params/a", "params/b", "key"]
    assert len(replicated_arrays(state)) == 4


def test_random_keys_have_checksums(four_ranks):
    mesh = tnt.init().mesh
    keys = [_jax.replicate(jax.random.key(seed), mesh) for seed in (0, 1)]
    sums = local_checksums(keys, mesh)
    assert (sums == sums[0]).all()
    assert sums[0, 0] != sums[0, 1]


def corrupted(x, rank):
    """Returns a replicated array of which one device holds another value."""
    parts = [np.array(part) for part in _jax.local_parts(x)]
    parts[rank].ravel().view(np.uint8)[0] ^= 1
    devices = x.sharding.mesh.devices.flat
    placed = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)


@pytest.mark.parametrize("way", ["host", "device"])
def test_a_replica_that_differs_is_found_on_its_rank(way, four_ranks):
    mesh = tnt.init().mesh
    good, bad = _jax.replicate([np.ones((3, 2), np.float32), np.int32(5)], mesh)
    bad = corrupted(bad, rank=2)
    if way == "host":
        sums = local_checksums([good, bad], mesh)
    else:
        program = checksum_program(mesh)
        sums = np.stack([np.asarray(program(x)) for x in (good, bad)], axis=1)
    assert (sums[:, 0] == sums[0, 0]).all()
    assert (sums[:, 1] != sums[0, 1]).tolist() == [False, False, True, False]


class Corrupt(tnt.callbacks.Callback):
    """Changes a bit of one array on one device, after the second epoch."""

    def __init__(self, find, rank):
        super().__init__()
        self.find, self.rank = find, rank

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            state = self.model.training_state.state
            leaf = self.find(state)
            changed = jax.tree.map(lambda x: corrupted(x, self.rank) if x is leaf else x, state)
            self.model.training_state._core.trainer.state = changed


CHOICES = [{}, {"shard_optimizer_state": True}, {"frozen": ["bias"]}, {"reproducible": True}]


@pytest.mark.parametrize(
    ("part", "choices"),
    [*(("kernel", choices) for choices in CHOICES), ("bias", {"frozen": ["bias"]})],
    ids=str,
)
def test_a_device_whose_weights_drift_ends_training(part, choices, four_ranks):
    import flax.linen as nn

    model = tnt.Model(nn.Dense(3), **choices)
    model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    x, y = np.ones((16, 4), np.float32), np.zeros((16, 3), np.float32)
    model.build(x)
    where = "model_state" if part == "bias" and "frozen" in choices else "params"

    def find(state):
        found = [
            leaf
            for leaf in jax.tree.leaves(getattr(state, where))
            if leaf.ndim == (part == "kernel") + 1
        ]
        return found[0]

    with pytest.raises(RuntimeError, match=rf"end of epoch 2.*{part} on rank 3 \(process 0\)"):
        model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[Corrupt(find, rank=3)])


def test_equal_replicas_train_on(four_ranks):
    import flax.linen as nn

    model = tnt.Model(nn.Dense(3), shard_optimizer_state=True)
    model.compile(tnt.optimizers.Adam(0.1), loss="mse")
    x, y = np.ones((16, 4), np.float32), np.zeros((16, 3), np.float32)
    assert len(model.fit(x, y, batch_size=8, epochs=3, verbose=0).epoch) == 3
