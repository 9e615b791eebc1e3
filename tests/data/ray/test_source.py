"""Every process gets its rows of the global batches, as from arrays, of blocks of any size."""

import sys

import numpy as np
import pytest
from ray_rows import columns, dataset_of, in_processes, rank_slices

import tnt_jax as tnt
from tnt_jax.data.ray.row_stream import RowStreams
from tnt_jax.data.ray.source import Connection, RaySource
from tnt_jax.data.ray.spec import RayData, is_ray_dataset, is_ray_iterator, is_ray_shard
from tnt_jax.data.sources import ArraySource


def read(dataset, num_processes, *, local_ranks=1, epochs=(0,), start=0, **options):
    """Returns the batches of each epoch, by process, or the exception of each process."""
    slices = rank_slices(num_processes, local_ranks)

    def make(process, board):
        return RaySource(RayData(dataset, **options), slices[process], board=board)

    return in_processes(
        make, num_processes, lambda source: [list(source.batches(e, start)) for e in epochs]
    )


def assert_like_arrays(found, num_rows, size, num_processes, *, local_ranks=1, start=0):
    for process, rank_slice in enumerate(rank_slices(num_processes, local_ranks)):
        data = columns(num_rows)
        arrays = ArraySource(
            (data["x"], data["y"], None), global_batch_size=size, rank_slice=rank_slice
        )
        expected = list(arrays.batches(0, start))
        assert not isinstance(found[process], Exception), found[process]
        assert len(found[process][0]) == len(expected)
        for one, other in zip(found[process][0], expected, strict=True):
            np.testing.assert_array_equal(one.data[0], other.data[0])
            np.testing.assert_array_equal(one.data[1], other.data[1])
            np.testing.assert_array_equal(one.mask, other.mask)
            assert one.num_rows == other.num_rows


def test_a_stream_is_dropped_with_the_last_process_that_reads_it():
    streams = RowStreams()
    streams.open("rows", None, 2)
    streams.close("rows", 0)
    streams.close("rows", 0)
    assert streams._streams.keys() == {"rows"}
    streams.close("rows", 1)
    assert not streams._streams


@pytest.mark.parametrize(
    ("num_rows", "sizes", "size", "num_processes", "local_ranks"),
    [
        (11, (11,), 4, 1, 1),
        (11, (1, 0, 7, 3), 4, 2, 1),
        (13, (5, 8), 6, 3, 2),  # The last batch has a row for the first rank alone.
        (12, (3, 3, 3, 3), 6, 2, 1),
        (5, (1, 1, 1, 1, 1), 8, 2, 4),
    ],
)
def test_batches_are_those_of_arrays(ray_data, num_rows, sizes, size, num_processes, local_ranks):
    dataset = dataset_of(ray_data, num_rows, sizes=sizes)
    found = read(dataset, num_processes, local_ranks=local_ranks, batch_size=size)
    assert_like_arrays(found, num_rows, size, num_processes, local_ranks=local_ranks)


def test_rows_keep_their_order_whichever_task_is_first(ray_data):
    def slow_first(batch):
        import time

        time.sleep(0.5 if batch["y"][0] == 0 else 0)
        return batch

    dataset = dataset_of(ray_data, 12, num_blocks=4).map_batches(slow_first, batch_size=None)
    assert_like_arrays(read(dataset, 2, batch_size=5), 12, 5, 2)


def test_tasks_run_once_for_all_processes(ray_data, tmp_path):
    folder = str(tmp_path)

    def note(batch):
        import pathlib
        import uuid

        pathlib.Path(folder, uuid.uuid4().hex).touch()
        return batch

    dataset = dataset_of(ray_data, 12, num_blocks=3).map_batches(note, batch_size=None)
    assert_like_arrays(read(dataset, 3, batch_size=6), 12, 6, 3)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_pass_begins_at_any_batch_of_any_size(ray_data):
    dataset = dataset_of(ray_data, 23, sizes=(4, 9, 10)).map_batches(lambda batch: batch)
    for size, start in ((4, 3), (5, 1), (4, 6)):
        found = read(dataset, 2, batch_size=size, start=start)
        assert_like_arrays(found, 23, size, 2, start=start)


def test_a_remainder_is_dropped_on_request(ray_data):
    dataset = dataset_of(ray_data, 11, num_blocks=2)
    (epochs,) = read(dataset, 1, batch_size=4, drop_remainder=True)
    assert [batch.num_rows for batch in epochs[0]] == [4, 4]


def targets(epochs):
    return [np.concatenate([batch.data[1] for batch in batches]).tolist() for batches in epochs]


def test_shuffles_of_an_epoch_depend_on_the_epoch_alone(ray_data):
    from ray.data import RandomSeedConfig

    rows = dataset_of(ray_data, 16, num_blocks=2)

    def by_epoch(epoch):
        return rows.random_shuffle(seed=epoch)

    for dataset in (by_epoch, rows.random_shuffle(seed=RandomSeedConfig(seed=5))):
        (first,) = map(targets, read(dataset, 1, batch_size=8, epochs=(0, 1, 2)))
        (later,) = map(targets, read(dataset, 1, batch_size=8, epochs=(2, 1)))
        assert later == [first[2], first[1]]
        assert first[0] != first[1]
        assert all(sorted(epoch) == list(range(16)) for epoch in first)


def test_the_order_of_the_first_rows_is_known(ray_data):
    def orders(dataset):
        source = RaySource(RayData(dataset, batch_size=4), rank_slices(1)[0])
        assert source.row_order.parts == {}
        next(source.batches(0))
        return source.row_order.parts

    dataset = dataset_of(ray_data, 16, num_blocks=2)
    assert orders(dataset) == orders(dataset)
    assert len(orders(dataset)) == 1
    assert orders(dataset.random_shuffle(seed=1)) != orders(dataset.random_shuffle(seed=2))


def test_the_number_of_rows_is_known_of_a_dataset_in_memory(ray_data):
    dataset = dataset_of(ray_data, 11, num_blocks=2)
    known = RaySource(RayData(dataset.materialize(), batch_size=4), rank_slices(1)[0])
    assert (known.num_batches, known.num_examples) == (3, 11)
    lazy = RaySource(RayData(dataset.map(lambda row: row), batch_size=4), rank_slices(1)[0])
    assert (lazy.num_batches, lazy.num_examples) == (None, None)


def test_an_error_of_a_task_is_raised_on_every_process(ray_data):
    def fail(batch):
        if 7 in batch["y"]:
            raise OSError("broken file")
        return batch

    dataset = dataset_of(ray_data, 12, num_blocks=4).map_batches(fail, batch_size=None)
    for error in read(dataset, 2, batch_size=4):
        assert "broken file" in str(error)


def test_a_function_must_return_a_dataset(ray_data):
    (error,) = read(lambda epoch: [epoch], 1, batch_size=4)
    assert "must return the ray.data.Dataset of the epoch, but for epoch 0 it returned list" in str(
        error
    )


def test_a_cluster_without_a_free_cpu_causes_a_warning(ray_data, monkeypatch, caplog):
    import ray

    monkeypatch.setattr(ray, "available_resources", lambda: {"memory": 1.0})
    lazy = dataset_of(ray_data, 4).map(lambda row: row)
    RaySource(RayData(lazy, batch_size=4), rank_slices(1)[0])
    assert "No CPU of the Ray cluster is free" in caplog.text


def test_a_pass_that_is_left_does_not_hold_up_the_next(ray_data):
    dataset = dataset_of(ray_data, 64, num_blocks=16).map_batches(lambda batch: batch)

    def work(source):
        assert next(source.batches(0)).num_rows == 4
        return [list(source.batches(0))]

    def make(process, board):
        return RaySource(RayData(dataset, batch_size=4), rank_slices(2)[process], board=board)

    assert_like_arrays(in_processes(make, 2, work), 64, 4, 2)


def test_an_iterator_over_the_whole_dataset_is_read_as_one(ray_data):
    dataset = dataset_of(ray_data, 11, num_blocks=2)
    assert is_ray_iterator(dataset.iterator())
    assert not is_ray_shard(dataset.iterator())
    assert is_ray_dataset(dataset)
    assert_like_arrays(read(dataset.iterator(), 2, batch_size=4), 11, 4, 2)


def test_one_actor_serves_the_job_and_ends_with_it(ray_data):
    import ray

    def names():
        return [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == "tnt_jax"
        ]

    tnt.shutdown()
    spec = RayData(dataset_of(ray_data, 4), batch_size=4)
    sources = [RaySource(spec, rank_slices(1)[0]) for _ in range(2)]
    assert [len(list(source.batches(0))) for source in sources] == [1, 1]
    (name,) = names()
    # One that has died is replaced.
    ray.kill(ray.get_actor(name, namespace="tnt_jax"))
    with pytest.raises(ray.exceptions.RayActorError):
        list(sources[0].batches(0))
    assert len(list(RaySource(spec, rank_slices(1)[0]).batches(0))) == 1
    assert names() != [name]
    tnt.shutdown()
    assert names() == []


def test_other_objects_are_refused():
    for other in ([1, 2], np.zeros(3), dict, None):
        with pytest.raises(TypeError, match=r"RayData takes a ray.data.Dataset, a function"):
            RayData(other)


def test_without_a_connection_every_process_says_so(monkeypatch, ray_data):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    errors = read(lambda epoch: None, 2, batch_size=4)
    for error in errors:
        assert "not connected to a Ray cluster. Call ray.init(address=...)" in str(error)


def test_processes_on_different_clusters_are_told_so(ray_data, monkeypatch):
    monkeypatch.setattr(Connection, "_address", lambda self: f"10.0.0.{self.process}:6379")
    for error in read(dataset_of(ray_data, 4), 2, batch_size=4):
        assert "cluster at 10.0.0.0:6379 and process 1 to that at 10.0.0.1:6379" in str(error)


def test_without_ray_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (error,) = read(lambda epoch: None, 1, batch_size=4)
    assert 'pip install "tnt-jax[ray]"' in str(error)
