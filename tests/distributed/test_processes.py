"""Real processes started by the real launcher give the numbers of one."""

import json
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from processes import SCRIPTS, environment, free_address, launch

pytestmark = pytest.mark.multiprocess


LATE = """
import time, numpy as np, tnt_jax as tnt
from tnt_jax.distributed.host import collectives
tnt.init()
time.sleep(33 * tnt.get_rank())
print('sum', collectives.all_reduce(np.float32(tnt.get_rank() + 1)), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def late_job(request):
    """A job of which one process begins late, and which mostly sleeps while other tests run; None
    where its test is not chosen.
    """
    if not any("begins_late" in item.name for item in request.session.items):
        yield None
        return
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "late.py"
        script.write_text(LATE)
        yield pool.submit(launch, 2, script, flags=["--output-on-all-devices"])


RECIPE = {"num_examples": 31, "size": 9}
RECIPES = {
    "arrays": {**RECIPE, "source": "arrays"},
    "batches": {**RECIPE, "source": "batches"},
    "accumulation": {**RECIPE, "source": "arrays", "accumulation": 2},
    # Statistics of each rank's own rows, which the ranks average.
    "statistics": {**RECIPE, "source": "arrays", "axis_name": None},
}


def train(num_processes, folder, *names, num_devices=1, **options):
    """Trains by recipes, all in one start; returns what each process wrote, by recipe, and the
    screen.
    """
    recipes = {name: RECIPES[name] for name in names}
    for name in names:
        (folder / name).mkdir(parents=True)
    words = json.dumps(recipes), folder, num_devices
    result = launch(num_processes, SCRIPTS / "train_parity.py", *words, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return {
        name: [dict(np.load(file)) for file in sorted((folder / name).iterdir())] for name in names
    }, result.stdout


def alone(name, folder):
    """Returns the results of one device of this process."""
    script = runpy.run_path(str(SCRIPTS / "train_parity.py"))
    script["train"](RECIPES[name], folder)
    with np.load(folder / "process0.npz") as results:
        return dict(results)


def assert_equal_to_one(results, expected, num_ranks):
    for result in results:
        assert result["size"] == num_ranks
        for name in expected.keys() - {"rank", "size"}:
            np.testing.assert_allclose(
                result[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name
            )


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_equal_one(num_processes, use_ranks, tmp_path):
    together, screen = train(num_processes, tmp_path, "arrays", "batches")
    use_ranks(1)
    for name, results in together.items():
        assert [result["rank"] for result in results] == list(range(num_processes))
        assert_equal_to_one(results, alone(name, tmp_path), num_processes)
    assert screen.count("Epoch 2/2") == 2, "Only the master prints, once for each recipe."


@pytest.mark.slow
@pytest.mark.long
def test_processes_of_two_devices_that_accumulate_equal_one(use_ranks, tmp_path):
    together, _ = train(2, tmp_path, "accumulation", num_devices=2)
    assert len(together["accumulation"]) == 2
    use_ranks(1)
    assert_equal_to_one(together["accumulation"], alone("accumulation", tmp_path), 4)


@pytest.mark.slow
@pytest.mark.long
def test_shared_memory_gives_the_bits_of_sums_by_xla(tmp_path):
    # They are two programs, which without optimizations round what they compute otherwise.
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    memory, _ = train(2, tmp_path / "memory", "statistics", **optimized)
    xla, _ = train(2, tmp_path / "xla", "statistics", TNT_SHARED_MEMORY="0", **optimized)
    for own, other in zip(memory["statistics"], xla["statistics"], strict=True):
        for name, value in own.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


# Those of `test_leaving.py` that leave by a callback or an error in the data show nearly the same of
# processes that train together.
@pytest.mark.parametrize(
    "sync",
    [pytest.param("None", marks=pytest.mark.long), "tnt.LocalSteps(every=2, groups='process')"],
    ids=["together", "in groups"],
)
def test_an_exception_on_one_rank_ends_the_others_and_passes_its_code_on(sync, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(
        "import numpy as np, flax.linen as nn, tnt_jax as tnt\n"
        f"model = tnt.Model(nn.Dense(1), sync={sync})\n"
        "model.compile('sgd', loss='mse')\n"
        "class Fail(tnt.callbacks.Callback):\n"
        "    def on_train_batch_begin(self, batch, logs=None):\n"
        "        if batch == 2 and tnt.get_rank() == 1: raise KeyError('broken on one rank')\n"
        "model.fit(np.zeros((64, 3), 'f4'), np.zeros((64, 1), 'f4'), batch_size=4, epochs=1000, "
        "callbacks=[Fail()], verbose=0)\n"
    )
    result = launch(2, script, timeout_s=120)
    assert result.returncode == 1
    assert "broken on one rank" in result.stderr
    assert "rank 1" in result.stderr.lower()


CALLBACKS = """
import sys, numpy as np, flax.linen as nn, tnt_jax as tnt
from tnt_jax.keras_compat.callbacks import *

class Note(Callback):
    def __init__(self, name): super().__init__(); self.name = name
    def on_train_begin(self, logs=None): noted.append(self.name)

class Other(Note): pass

class Stop(Callback):
    def on_train_batch_end(self, batch, logs=None): self.model.stop_training = batch == 3
    def on_test_batch_end(self, batch, logs=None):
        noted.append(batch); self.model.stop_evaluating = batch == 3

class Calls(Callback):
    def on_epoch_end(self, epoch, logs=None): eval(sys.argv[2], globals(), {"self": self})

path, rank = sys.argv[1], tnt.get_rank()
is_master = tnt.is_master_rank()
x = np.zeros((96, 2), "f4")
model = tnt.Model(nn.Dense(1))
model.compile("sgd", loss="mse")

def fit(callbacks):
    global noted, before
    noted, before = [], int(model.optimizer.iterations)
    return model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)

def attempt(number, *callbacks):
    try:
        history = fit(list(callbacks))
        assert len(history.history["loss"]) == len(history.epoch) > 0
        print(number, rank, *noted, int(model.optimizer.iterations) - before, flush=True)
    except ValueError as error:
        print(number, rank, error, flush=True)
"""
ACCEPTED = """
attempt("history", *([History()] if is_master else []))
first, last = Note("first"), Note("last")
attempt("middle", first, *([Other("alone")] if is_master else []), last)
attempt("none", *([Note("alone"), CSVLogger(path + ".csv")] if is_master else []))
attempt("stop", *([Stop(), OnMaster(Note("alone"))] if is_master else []), last)
attempt("saves", *([ModelCheckpoint(path)] if is_master else []))
noted = []
model.evaluate(x, x[:, :1], batch_size=4, verbose=0, callbacks=[Stop()] if is_master else [])
print("evaluate", rank, len(noted), flush=True)
"""
# The rows 2 and 3, which process 1 alone sees, have the wrong label.
BAD_LABEL = """
classifier = tnt.Model(nn.Dense(3))
classifier.compile("sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
try:
    classifier.fit([(x[:6], np.array([0, 1, 2, 3, 0, 1]))], verbose=0)
except (ValueError, RuntimeError) as error:
    print("caught", rank, error, flush=True)
"""
REFUSED = """
attempt("early", *([EarlyStopping("loss")] if is_master else []))
attempt("every", *([OnAllRanks(TerminateOnNaN())] if is_master else []))
attempt("backup", *([BackupAndRestore(path)] if is_master else []))
attempt("other", *([] if is_master else [Note("")]))
attempt("last", *([Note("")] if rank != 2 else []))
attempt("order", *([Note(""), Other("")] if is_master else [Other(""), Note("")]))
"""
CALLS = "fit([Calls()] if is_master else [])\n"


def printed(result, number):
    """Returns what each process printed of an attempt, in the order of the ranks."""
    lines = [line.partition("] ")[2].split(" ", 2) for line in result.stdout.splitlines()]
    return [text for _, _, text in sorted(line for line in lines if line[0] == number)]


def launch_callbacks(tmp_path, text, *words):
    script = tmp_path / "callbacks.py"
    script.write_text(CALLBACKS + text)
    flags = ["--output-on-all-devices"]
    return launch(3, script, tmp_path / "out", *words, flags=flags, timeout_s=150)


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """What one start prints of all attempts, and the folder that it writes to."""
    folder = tmp_path_factory.mktemp("attempts")
    text = ACCEPTED + REFUSED + BAD_LABEL + CALLS
    return launch_callbacks(folder, text, "self.model.evaluate(x, x[:, :1], verbose=0)"), folder


def test_bad_input_is_refused_on_every_process_alike(attempts):
    result, _ = attempts
    assert "caught 0 Process 1 failed: ValueError" in result.stdout
    assert "caught 1 Loss" in result.stdout
    assert "caught 2 Process 1 failed: ValueError" in result.stdout
    assert result.stdout.count("integer labels in [0, 3)") == 3


def test_callbacks_of_the_master_alone_run_there_and_others_keep_their_order(attempts):
    result, folder = attempts
    assert printed(result, "history") == ["48"] * 3
    assert printed(result, "middle") == ["first alone last 48", *["first last 48"] * 2]
    assert printed(result, "none") == ["alone 48", "48", "48"]
    # All stop after the same step: the request of one comes into force five programs later.
    assert printed(result, "stop") == ["alone last 9", *["last 9"] * 2]
    assert printed(result, "saves") == ["48"] * 3
    assert printed(result, "evaluate") == ["9", "0", "0"]
    assert (folder / "out.csv").read_text().startswith("epoch,")
    assert (folder / "out").exists()
    assert "Only the master passes Note, CSVLogger to Model.fit: it runs on the master alone" in (
        result.stderr
    )


def test_callbacks_that_differ_otherwise_are_refused_on_every_process_alike(attempts):
    result, _ = attempts
    for number, name in [
        ("early", "EarlyStopping"), ("every", "OnAllRanks(TerminateOnNaN)"),
        ("backup", "BackupAndRestore"),
    ]:  # fmt: skip
        told = set(printed(result, number))
        assert len(told) == 1
        text = f"{name} must be passed to Model.fit on every process, because it controls"
        assert text in told.pop()
    for number, lists in [
        ("other", "process 0 has [] and process 1 has [Note]"),
        ("last", "process 0 has [Note] and process 2 has []"),
        ("order", "process 0 has [Note, Other] and process 1 has [Other, Note]"),
    ]:
        told = set(printed(result, number))
        assert len(told) == 1
        assert f"must pass the same callbacks to Model.fit, but {lists}" in told.pop()


def assert_call_is_refused(result, name):
    assert result.returncode == 1
    assert f"RuntimeError: {name} needs every process, but Calls runs on process 0 alone" in (
        result.stderr
    )


def test_a_callback_of_the_master_alone_that_calls_the_model_is_refused(attempts):
    assert_call_is_refused(attempts[0], "Model.evaluate")


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("tnt.barrier()", "barrier"),
        ("self.model.predict_on_batch(x)", "A call for a single batch"),
    ],
)
def test_other_calls_of_such_a_callback_are_refused(tmp_path, call, name):
    assert_call_is_refused(launch_callbacks(tmp_path, CALLS, call), name)


@pytest.mark.long  # Another job of processes.
@pytest.mark.slow
def test_averaged_weights_that_lie_in_parts_are_those_that_every_process_keeps(tmp_path):
    script = tmp_path / "average.py"
    script.write_text(
        "import numpy as np, flax.linen as nn, jax, tnt_jax as tnt\n"
        "x = np.random.default_rng(0).normal(size=(32, 4)).astype('f4')\n"
        "def train(**choices):\n"
        "    model = tnt.Model(nn.Dense(6), **choices)\n"
        "    model.compile(tnt.optimizers.Adam(0.01, use_ema=True), loss='mse')\n"
        "    for _ in range(2): model.fit(x, np.ones((32, 6), 'f4'), batch_size=8, "
        "shuffle=False, verbose=0)\n"
        "    return jax.tree.leaves(model.variables)\n"
        "for part, whole in zip(train(shard_optimizer_state=True), train(), strict=True):\n"
        "    np.testing.assert_allclose(part, whole, rtol=1e-6, atol=1e-6)\n"
        "print('equal', flush=True)\n"
    )
    result = launch(2, script, flags=["--output-on-all-devices"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("equal") == 2


def test_a_killed_process_ends_the_others_without_the_launcher(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, flax.linen as nn, tnt_jax as tnt\n"
        "model = tnt.Model(nn.Dense(1))\n"
        "model.compile('sgd', loss='mse')\n"
        "class Tell(tnt.callbacks.Callback):\n"
        "    def on_epoch_end(self, epoch, logs=None): print('epoch', epoch, flush=True)\n"
        "model.fit(np.zeros((64, 3), 'f4'), np.zeros((64, 1), 'f4'), batch_size=4, "
        "epochs=100000, callbacks=[Tell()], verbose=0)\n"
    )
    address = free_address()
    started = [
        subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(TNT_COORDINATOR_ADDRESS=address, TNT_NUM_PROCESSES="2", TNT_PROCESS_ID=str(process)),
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        assert "epoch 0\n" in iter(started[0].stdout.readline, "")
        started[1].kill()
        _, errors = started[0].communicate(timeout=100)
    finally:
        for process in started:
            process.kill()
    assert started[0].returncode != 0
    # Either is seen first: that the connection ends, or that the process does.
    told = ("process 1 has ended or left", "Process 1 has ended without leaving the job")
    assert any(text in errors for text in told), errors


@pytest.mark.slow
def test_processes_wait_for_one_that_begins_late(late_job):
    # Gloo, which connects the processes in their first collective, gives up after 30 seconds.
    result = late_job.result()
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 3.0") == 2
