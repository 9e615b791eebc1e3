"""What `ray.train.get_dataset_shard` returns, in workers of Ray Train."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray_runs
import ray_training

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def by_value(ray_data, monkeypatch):
    """Lets the functions of the helper travel to workers."""
    import ray

    for name, value in ray_runs.VARIABLES.items():
        monkeypatch.setenv(name, value)
    ray.cloudpickle.register_pickle_by_value(ray_training)
    yield
    ray.cloudpickle.unregister_pickle_by_value(ray_training)


def run(dataset, folder, *, splits, dies=False, failures=1):
    """Trains in two workers on a dataset; returns the run's error, and the numbers of each rank."""
    import ray.train
    from ray.train.v2.jax import JaxTrainer

    def train_model(config):
        import tnt_jax as tnt

        def is_stored():
            # Ray notes the checkpoints that it has.
            notes = Path(folder, "storage").glob("*/checkpoint_manager_snapshot.json")
            return any('"checkpoint_dir_name"' in note.read_text() for note in notes)

        class Death(tnt.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                mark, step = Path(folder, "died"), self.model.optimizer.iterations
                # In the second epoch, a step after the checkpoint.
                if dies and (step, tnt.get_rank()) == (5, 1) and not mark.exists():
                    mark.touch()
                    while not is_stored():
                        time.sleep(0.1)
                    os.kill(os.getpid(), signal.SIGKILL)

        shard = ray.train.get_dataset_shard("train")
        model = ray_training.make_model()
        model.build(ray_training.X[:1])
        before = model.evaluate(shard, batch_size=ray_training.SIZE, verbose=0)
        callbacks = [Death(), tnt.callbacks.RayReport(save_freq=4)]
        found = ray_training.numbers(
            model, shard, validation_data=shard, batch_size=ray_training.SIZE, callbacks=callbacks
        )
        np.savez(f"{folder}/{tnt.get_rank()} of {tnt.get_size()}", before=before, **found)

    try:
        JaxTrainer(
            train_model,
            datasets={"train": dataset},
            dataset_config=ray.train.DataConfig(datasets_to_split="all" if splits else []),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=f"{folder}/storage",
                failure_config=ray.train.FailureConfig(max_failures=failures),
            ),
        ).fit()
    except ray.train.TrainingFailedError as error:
        return str(error), []
    return "", [dict(np.load(f"{folder}/{rank} of 2.npz")) for rank in range(2)]


def test_a_whole_dataset_gives_the_numbers_of_arrays(ray_data, by_value, tmp_path, two_ranks):
    expected = ray_training.numbers_of_arrays()
    error, ranks = run(ray_training.dataset_of(ray_data), tmp_path, splits=False, dies=True)
    assert not error
    assert Path(tmp_path, "died").exists()
    for found in ranks:
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, err_msg=name)


def test_shards_of_ray_have_every_row_once(ray_data, by_value, tmp_path, two_ranks):
    error, found = run(ray_training.dataset_of(ray_data), tmp_path, splits=True)
    assert not error
    model = ray_training.make_model()
    model.build(ray_training.X[:1])
    expected = model.evaluate(ray_training.X, ray_training.Y, verbose=0)
    np.testing.assert_allclose(found[0]["before"], expected, rtol=1e-5)
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)
    assert found[0]["history loss"][1] < found[0]["history loss"][0]


def test_a_killed_worker_goes_on_in_its_shard_if_the_order_repeats(
    ray_data, by_value, tmp_path, monkeypatch
):
    options = ray_data.DataContext.get_current().execution_options
    monkeypatch.setattr(options, "preserve_order", True)
    found = []
    for dies in (False, True):
        folder = tmp_path / json.dumps(dies)
        folder.mkdir()
        error, ranks = run(ray_training.dataset_of(ray_data), folder, splits=True, dies=dies)
        assert not error
        found.append(ranks[0])
    assert Path(folder, "died").exists()
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


def test_a_killed_worker_is_told_why_it_cannot_go_on_in_its_shard(ray_data, by_value, tmp_path):
    error, _ = run(ray_training.dataset_of(ray_data), tmp_path, splits=True, dies=True)
    assert "stopped after 8 rows of epoch 2" in error
    assert "preserve_order = True" in error
