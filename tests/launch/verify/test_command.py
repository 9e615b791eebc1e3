"""`tnt-jax verify`: what it refuses, and whole runs of it, of scripts with and without faults."""

import json

import pytest
from processes import SCRIPTS, environment

from tnt_jax.launch import trials
from tnt_jax.launch.planning.options import Verify, parse_options
from tnt_jax.launch.verify import command
from tnt_jax.launch.verify.command import Receipt
from tnt_jax.launch.verify.comparison import Recording, Rounding, Step
from tnt_jax.settings import RECORD_MARK

SCRIPT = SCRIPTS / "train_planted.py"
# Virtual devices of one process start faster than processes.
DEVICES = ("--no-gpu", "--processes-per-node", 1)


def parse(*words):
    return parse_options(("verify", *words), version="1")


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def test_options_of_verify():
    options = parse("--ranks", "4", "1", "--steps", "5", "--", "t.py", "--epochs", "3")
    assert options.verify == Verify((1, 4), steps=5)
    assert parse("--", "t.py").verify == Verify((1, 2, 4))
    assert not options.ends_early, "Each run says how it is recorded."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", "2"), "-n cannot be used with tnt-jax verify"),
        (("--ranks", "2", "2"), "each number once, but got 2 2"),
        (("--run-timeout", "0"), "must be above 0"),
    ],
)
def test_options_without_meaning_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse(*words, "--", "t.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "/nowhere.json"], "No such file or directory: '/nowhere.json'"),
        (["--against", __file__], "is no receipt of tnt-jax verify"),
        (["--against", "/"], "The receipt cannot be read: "),
        (["--receipt", __file__], "exists already, and is kept"),
        (["--receipt", "/nowhere/receipt.json"], "/nowhere is no folder that can be written to"),
        (["--no-gpu", "--scratch", __file__], "No folder can be made for the run that is resumed"),
        (["a.json"], "compares two receipts without running anything"),
    ],
)
def test_receipts_that_cannot_be_read_or_written_are_refused(run, words, message):
    script = [] if words == ["a.json"] else ["--", SCRIPT]
    code, out, err = run("verify", *words, *script)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("num_steps", "goes_on_at", "text"),
    [
        (8, 4, "2 ranks killed after 4 steps, resumed on 1: the same"),
        (8, 0, "FAILED. It goes on after step 0, but was killed after step 4."),
        (4, 4, "left out. Training ends after 4 steps; see --steps."),
    ],
)
def test_the_resumed_run_must_go_on_where_the_other_was_killed(num_steps, goes_on_at, text):
    def step(number):
        place = {"epoch": 0, "batch": number - 1, "num_rows": 4} if number else {}
        return Step(number, place, None, {}, {"a": {"digest": str(number)}})

    def recorded(first, last, **facts):
        rest = (step(number) for number in range(first + 1, last + 1))
        facts = {"ranks": 1, "unit": 2.0**-23} | facts
        return Recording(facts, step(first), tuple(rest))

    class Runs:
        def run(self, ranks, keep, *, recording, checkpoint_dir):
            first, last = {"killed": (0, 4), "resumed": (goes_on_at, 8)}[recording[0]]
            kept = recorded(first, last).to_dict()
            start, *steps = kept["steps"]
            lines = [kept["facts"] | start, *(each | each["place"] for each in steps)]
            return trials.Report([RECORD_MARK + json.dumps(line) for line in lines], 1, "")

    reference = recorded(0, num_steps)
    rounding = Rounding(reference, None)
    (check,) = command._with_a_fault(Runs(), Verify((1, 2)), "folder", reference, rounding)
    assert text in check.lines()[0]
    assert check.is_good == ("FAILED" not in text)


def verify(run, *words, ranks=(1, 2), flags=DEVICES):
    return run(
        "verify", "--ranks", *ranks, *flags, "--", SCRIPT, *words,
        timeout=500, environ=environment(),
    )  # fmt: skip


@pytest.mark.multiprocess
def test_a_training_that_keeps_the_promise_passes_all_checks(run, tmp_path):
    path = tmp_path / "receipt.json"
    code, out, err = verify(run, flags=(*DEVICES, "--receipt", path))
    assert code == 0, out + err
    lines = out.splitlines()
    assert lines[0].endswith("train_planted.py: 8 steps by fit, compared with 1 rank on cpu")
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "1 rank again, from weights changed by rounding errors",
        "2 ranks",
        "1 rank, rows in two passes",
        "2 ranks, optimizer state sharded",
        "2 ranks killed after 4 steps, resumed on 1",
    ]
    assert all("the same" in line for line in lines[1:]), out
    receipt = Receipt.from_json(path.read_text())
    # The end of the first epoch is among the steps: the last of its batches has 12 rows.
    assert 12 in [step.place["num_rows"] for step in receipt.reference.steps]
    assert run("verify", path, path)[:2] == (0, "The training is the same up to rounding.\n")

    kept = json.loads(path.read_text())
    kept["reference"]["facts"]["versions"]["jax"] = "0.9"
    kept["reference"]["steps"][3]["arrays"]["params/Dense_0/kernel"]["digest"] = "0"
    sums = kept["reference"]["steps"][3]["arrays"]["params/Dense_0/kernel"]["sums"]
    sums[:] = [value + 1 for value in sums]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(kept))
    code, out, _ = run("verify", other, path)
    assert code == 1
    assert out.startswith("Other jax: 0.9 there, ")
    assert "First at step 3 " in out
    assert "params/Dense_0/kernel" in out


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "step", "cause"),
    [
        long("batch norm", 1, "Likely: Statistics of each rank's own rows"),
        long("rate", 1, "The updates are 2 times those of the reference, in the same direction"),
        long("weights", 0, "Likely: The initial weights are not those of a seed"),
        long("draws", 1, "Likely: Random numbers that are drawn for a rank's own rows"),
        long("own rows", 4, "7 rows are not shared evenly by 2 ranks: a loss or a statistic"),
    ],
)
def test_a_planted_fault_is_named(run, fault, step, cause):
    code, out, err = verify(run, fault)
    assert code == 1, out + err
    assert "DIFFERS" in out
    first = "the start" if step == 0 else f"step {step} ("
    assert f"First at {first}" in out
    assert cause in out


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_loader_that_differs_between_processes_is_named(run):
    code, out, err = verify(run, "loader", flags=["--no-gpu", "--steps", 2])
    assert code == 1, out + err
    assert "2 ranks: DIFFERS. First at step 2 (batch 2 of epoch 1, 16 rows): 8 of 16 rows" in out
    assert "Likely: The data: a loader that differs between processes" in out


@pytest.mark.long
@pytest.mark.multiprocess
def test_processes_that_are_killed_in_the_middle_are_resumed(run):
    code, out, err = verify(run, flags=["--no-gpu", "--steps", 4])
    assert code == 0, out + err
    assert "2 ranks killed after 2 steps, resumed on 1: the same" in out


@pytest.mark.long  # tests/keras_compat/test_recorded_loop.py shows nearly the same.
@pytest.mark.multiprocess
def test_a_loop_of_the_script_is_compared_too(run):
    code, out, err = verify(run, "loop")
    assert code == 0, out + err
    lines = out.splitlines()
    assert "8 steps by train_step, compared with 1 rank" in lines[0]
    assert [line.partition(":")[0] for line in lines if "the same" in line] == [
        "1 rank again, from weights changed by rounding errors",
        "2 ranks",
        "1 rank, rows in two passes",
        "2 ranks killed after 4 steps, resumed on 1",
    ]
    assert "sharded: left out. train_step updates its state itself" in out


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("text", "message"),
    [("print('no fit')", "has ended without a call of fit, or of"), ("1 / 0", "division by zero")],
)
def test_scripts_that_cannot_be_compared(run, script, text, message):
    code, out, err = run("verify", "--ranks", 1, "--no-gpu", "--", script(text), timeout=60)
    assert (code, out) == (1, "")
    assert message in err
