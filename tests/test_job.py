"""What belongs to the job lives in one object, which `shutdown` drops: the next job starts clean."""

import ast
import gc
import logging
import weakref
from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax import job, seeding
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.liveness import phases
from tnt_jax.job import Slot, end_job, once_per_job
from tnt_jax.train.checkpoints.checkpoint import Checkpoints

PACKAGE = Path(tnt.__file__).parent
X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
# What outlives the job, and why stands beside it in the file.
OF_THE_PROCESS = {
    "job._job",
    "job._lock",
    "adapters.forward_passes._lock",
    "cluster.clusters._agreed",
    "data.indexed.fetch._recipe_of_worker",
    "data.feed._running",
    "distributed.liveness.rendezvous._is_ending",
    "distributed.liveness.rendezvous._waiting_threads",
    "keras_compat.saving.descriptions.known_modules",
    "keras_compat.fit.start_check.installed_versions",
    "keras_compat.saving.descriptions._others_by_id",
    "launch.supervisor._listeners",
    # The line to the launcher, which a process gets once.
    "distributed.elastic.link",
    # The handler of errors of C++, which all jobs of a process need once it is set.
    "_jax.processes.stop_threads_that_fail",
    "_jax.compiling._without_ynn_convolutions",
    # Answers about dtypes and modules, and kinds of keys by what they draw.
    "train.checkpoints.files._is_storable",
    "keras_compat.comparable._is_library",
    "distributed.sums.random_rows._impl",
    "distributed.sums.random_rows._known_draws",
    # What a fork must close.
    "train.checkpoints.directory._open_files",
    # What this version of JAX has.
    "_jax.compiling._compiling",
}


@pytest.fixture(autouse=True)
def no_job():
    """Ends the job that other tests have begun, and the one of the test."""
    tnt.shutdown()
    yield
    tnt.shutdown()


class Bag(set):
    """A set that can be referred to weakly."""


def test_each_job_makes_its_own_values_and_forgets_them():
    slot = Slot(Bag)
    first = slot.get()
    assert slot.get() is first
    first.add(1)
    reference = weakref.ref(first)
    del first
    end_job()
    gc.collect()
    assert reference() is None
    assert slot.get() == set()


def test_values_are_closed_the_latest_first_and_all_of_them():
    closed = []

    def close(value):
        closed.append(value)
        if value == "second":
            raise OSError("it is stuck")

    slots = {name: Slot(lambda: None, close=close) for name in ("third", "first", "second")}
    unused = Slot(lambda: "unused", close=close)
    assert slots["second"].get() is None
    for name in ("first", "second", "third"):
        slots[name].set(name)
    with pytest.raises(OSError, match="it is stuck"):
        end_job()
    assert closed == ["third", "second", "first"]
    end_job()
    assert closed == ["third", "second", "first"]
    assert unused.get() == "unused"


def test_what_is_done_once_is_done_once_in_each_job():
    calls = []

    @once_per_job
    def note(text, *, loud=False):
        calls.append((text, loud))
        return len(calls)

    assert [note("a"), note("b"), note("a"), note("a", loud=True)] == [1, 2, 1, 3]
    end_job()
    assert note("a") == 4


class Norm(nn.Module):
    """A model whose training is warned of, as its batches are small."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(x))


def train(folder, num_ranks, seed):
    """Trains in a job of its own; returns the losses, the warnings, and what the job has made."""
    runtime.init(devices=range(num_ranks))
    if seed is not None:
        tnt.set_seed(seed)
    model = tnt.Model(Norm())
    model.compile("sgd", loss="mse")
    checkpoints = Checkpoints(folder)
    losses = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
    checkpoints.save(model.state)
    values = [value for value in job._job.values.values() if value is not None]
    return losses, checkpoints, values


def test_two_jobs_of_one_process_start_alike(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="tnt_jax"):
        results, texts, references, written = [], [], [], []
        for number, num_ranks in enumerate((4, 2, 4)):
            caplog.clear()
            logging.getLogger("tnt_jax").propagate = True
            losses, checkpoints, values = train(tmp_path / str(number), num_ranks, None)
            results.append((losses, num_ranks == tnt.get_size()))
            texts.append([record.getMessage() for record in caplog.records])
            references.append([_reference(value) for value in values])
            del values
            written.append(checkpoints)
            tnt.shutdown()
    assert results[0] == results[2]
    assert [fits for _, fits in results] == [True] * 3
    assert texts[0] == texts[2]
    assert [checkpoints.newest() for checkpoints in written] == [8, 8, 8]
    tnt.shutdown()
    gc.collect()
    alive = [
        found for job_ in references for made in job_ if (found := made and made()) is not None
    ]
    assert any(references[0])
    assert alive == []


def _reference(value):
    """Returns a weak reference to a value, None to one that cannot be referred to."""
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def test_a_seed_is_of_its_job_and_may_come_before_it(tmp_path):
    tnt.set_seed(7)
    tnt.init()
    assert seeding.seed_or_default(None) == 7
    tnt.shutdown()
    assert seeding.seed_or_default(None, default=42) == 42


def test_a_call_that_runs_while_the_job_ends_leaves_nothing_in_the_next(monkeypatch):
    with phases.calling("Model.fit"), phases.waiting("a sum"):
        tnt.shutdown()
        assert phases.here().note() == phases.Note()
    assert phases.here().note() == phases.Note()


def test_checkpoints_go_on_in_the_next_job(tmp_path):
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", loss="mse")
    model.fit(X, Y, batch_size=16, verbose=0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model.state)
    tnt.shutdown()
    model.fit(X, Y, batch_size=16, verbose=0)
    checkpoints.save(model.state)
    checkpoints.wait()
    assert checkpoints.newest() == 8
    checkpoints.close()


@pytest.mark.multiprocess
def test_processes_leave_their_job_clean_and_are_told_that_they_cannot_join_again():
    result = launch(2, SCRIPTS / "two_jobs.py", timeout_s=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["0 starts clean"]


def _mutable_state(file):
    """Yields the names of a file's values that change, by the way in which they are made."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_mutable(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target)
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(decorator).split("(")[0].split(".")[-1] in ("cache", "lru_cache")
            for decorator in node.decorator_list
        ):
            yield node.name
        for inner in ast.walk(node):
            if isinstance(inner, ast.Global):
                yield from inner.names


def _is_mutable(value):
    """Tells whether a value is empty, and so waits to be filled, or is an object with a state."""
    if isinstance(value, (ast.List, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    if not isinstance(value, ast.Call):
        return False
    kind = ast.unparse(value.func).split("[")[0].split(".")[-1]
    makers = ("set", "dict", "list", "deque", "defaultdict", "count", "local", "Lock", "RLock")
    return kind in (*makers, "Event", "Condition") or kind.startswith(("Weak", "_J"))


def test_files_keep_no_state_of_their_own():
    found = {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts) + f".{name}"
        for file in PACKAGE.rglob("*.py")
        for name in _mutable_state(file)
    }
    assert found == OF_THE_PROCESS
