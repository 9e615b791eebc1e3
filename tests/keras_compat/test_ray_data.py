"""`fit`, `evaluate` and `predict` on Ray data give the numbers of the same rows in arrays."""

import numpy as np
import pytest
from long_params import long_but_last
from processes import SCRIPTS, launch

import tnt_jax as tnt

pytest.importorskip("ray", reason="needs the extra ray")
import ray_training as training


def assert_same(found, expected, rtol=0.0):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, err_msg=name)


def test_training_has_the_bits_of_arrays(ray_data, two_ranks):
    spec = tnt.data.RayData(training.dataset_of(ray_data), batch_size=training.SIZE, inputs="x")
    found = training.numbers(training.make_model(), spec, validation_data=spec)
    assert_same(found, training.numbers_of_arrays())


@pytest.mark.parametrize("arguments", long_but_last({"tnt_micro_batch_size": 4}, {"batch_size": 8}))
def test_a_dataset_alone_takes_the_batch_size_of_the_call(ray_data, two_ranks, arguments):
    one, other = training.make_model(), training.make_model()
    rows, arrays = training.dataset_of(ray_data), (training.X, training.Y)
    seen = one.fit(rows.iterator(), epochs=2, verbose=0, validation_data=rows, **arguments)
    expected = other.fit(
        *arrays, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=arrays
    )
    assert_same(weights(one), weights(other))
    assert_same(seen.history, expected.history)


def weights(model):
    return dict(enumerate(map(np.asarray, model.get_weights())))


class Stop(Exception):
    pass


class StopAt(tnt.callbacks.Callback):
    """Ends the run by an error after a batch of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1):
            raise Stop


def fit(model, dataset, folder, *callbacks):
    backup = tnt.callbacks.BackupAndRestore(folder, save_freq=1)
    model.fit(dataset, batch_size=8, epochs=2, verbose=0, callbacks=[backup, *callbacks])
    return model


def interrupt(dataset, folder):
    with pytest.raises(Stop):
        fit(training.make_model(), dataset, folder, StopAt())


def test_an_interrupted_run_goes_on_at_its_row_on_another_number_of_ranks(
    ray_data, use_ranks, tmp_path
):
    dataset = training.dataset_of(ray_data)
    use_ranks(2)
    interrupt(dataset, tmp_path)
    use_ranks(4)
    epochs = []
    begun = tnt.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    resumed = fit(training.make_model(), dataset, tmp_path, begun)
    assert epochs == [1]
    use_ranks(2)
    expected = training.make_model()
    expected.fit(training.X, training.Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same(weights(resumed), weights(expected), rtol=1e-5)


def test_a_run_on_another_order_is_refused(ray_data, two_ranks, tmp_path):
    dataset = training.dataset_of(ray_data)
    interrupt(dataset, tmp_path)
    with pytest.raises(ValueError, match="order of the first rows"):
        fit(training.make_model(), dataset.random_shuffle(seed=1), tmp_path)


def test_a_run_whose_order_does_not_repeat_is_refused(ray_data, two_ranks, tmp_path):
    (shard,) = training.dataset_of(ray_data).streaming_split(1)
    interrupt(shard, tmp_path)
    with pytest.raises(ValueError, match=r"after \d+ rows of epoch 2.*preserve_order = True"):
        fit(training.make_model(), shard, tmp_path)


def test_missing_columns_are_named_before_training(ray_data, two_ranks):
    spec = tnt.data.RayData(training.dataset_of(ray_data), batch_size=8, targets="label")
    with pytest.raises(ValueError, match="targets names the column 'label', but the columns are"):
        training.make_model().fit(spec, verbose=0)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.long  # A job of processes; tests of tests/data/ray have several readers in one.
@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_share_one_execution_and_end_with_it(
    num_processes, ray_data, ray_cluster, tmp_path, use_ranks
):
    done = launch(
        num_processes, SCRIPTS / "train_ray_data.py", ray_cluster.address, tmp_path,
        flags=["--output-on-all-devices"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    use_ranks(num_processes)
    expected = training.numbers_of_arrays()
    for process in range(num_processes):
        assert f"process {process} has ended" in done.stdout
        with np.load(tmp_path / f"{process}.npz") as found:
            assert_same(dict(found), expected, rtol=2e-5)
