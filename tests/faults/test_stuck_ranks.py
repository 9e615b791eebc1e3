"""A process that makes no progress is named, with its stack, and the job ends with exit code 76."""

import re
from dataclasses import replace

import pytest
from faulty_jobs import STOP, run_faulty

import tnt_jax as tnt
from tnt_jax.distributed.liveness.phases import Note
from tnt_jax.distributed.liveness.watch import Seen, SlowRanks, find_cause, find_slow
from tnt_jax.settings import STALLED_EXIT_CODE

FIT = {"calls": ("Model.fit",), "epoch": 1, "step": 4}
SLEEP = "time.sleep(1000)"


def note(phase="", *, stuck_s=61.0, **changes):
    return Note(**FIT | {"phase": phase, "stuck_s": stuck_s} | changes)


STEP = note("step")
SUM = note("step", waits="sum of gradients")
OWN_CODE = Note(stuck_s=61.0)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        # Who does not wait is the cause, however far the others have got.
        ([SUM, note("callback", what="Act.on_epoch_end")], 1),
        ([note("data"), SUM], 0),
        ([SUM, note("data", waits="data of process 2"), note("data")], 2),
        ([note("callback", reads_device=True), note("data")], 1),
        ([SUM, note("loop", calls=())], 1),
        # The one that is furthest behind, if several do not wait.
        ([note("data", step=5), note("callback", step=4), STEP], 1),
        # Nobody waits: all take their time.
        ([note("data"), note("data")], None),
        ([note("callback", stuck_s=9999.0), note("callback", stuck_s=9999.0)], None),
        ([note("callback", stuck_s=9999.0), note("step", stuck_s=59.0)], None),
        # All wait: for the one whose wait is not known, or the one that is behind.
        ([SUM, STEP], 1),
        ([STEP, STEP], 0),
        ([note("step", step=5), STEP], 1),
        # It is not over its limit.
        ([SUM, note("callback", stuck_s=59.0)], None),
        ([SUM, note("compile", stuck_s=599.0)], None),
        ([SUM, note("compile", stuck_s=601.0)], 1),
        ([note("compile", stuck_s=601.0), note("compile", stuck_s=601.0)], None),
        ([SUM, note("save", stuck_s=599.0)], None),
        ([SUM, note("save", stuck_s=601.0)], 1),
        ([SUM, note("callback", limit_s=100.0)], None),
        ([SUM, note("callback", limit_s=30.0, stuck_s=31.0)], 1),
        # A script may do what it likes between two calls, as long as nobody waits for it.
        ([OWN_CODE, Note(stuck_s=9999.0)], None),
        ([Note(waits="barrier", stuck_s=61.0), Note(stuck_s=599.0)], None),
        ([Note(waits="barrier", stuck_s=61.0), Note(stuck_s=601.0)], 1),
        ([Note(waits="barrier", stuck_s=59.0), Note(stuck_s=601.0)], None),
        (
            [
                Note(waits="barrier", stuck_s=61.0, members=(0, 2)),
                Note(stuck_s=601.0),
                note("data", stuck_s=1.0),
            ],
            None,
        ),
        # They may wait for their devices, as long as nobody is in a call.
        ([Note(reads_device=True, stuck_s=601.0)] * 2, None),
        # One that has left its script is no cause of a stall: others end by another rule.
        ([note("step", stuck_s=5.0), Note(has_left=True, stuck_s=9999.0)], None),
    ],
)
def test_the_cause_is_the_process_that_others_wait_for(notes, expected):
    cause = find_cause([Seen(each) for each in notes], 60.0)
    assert (None if cause is None else cause.process) == expected


EVALUATE = note(
    calls=("Model.fit", "Model.evaluate"), meetings=8, epoch=0, step=0, waits="Model.evaluate"
)
BATCH = Note(
    meetings=4,
    calls=("Model.train_on_batch",),
    phase="step",
    waits="sum of gradients",
    stuck_s=61.0,
)


@pytest.mark.parametrize(
    ("notes", "expected", "text"),
    [
        (
            [EVALUATE, SUM],
            0,
            "for 61 s (TNT_STALL_TIMEOUT is 60 s) in Model.evaluate (called in Model.fit), a call "
            "that process 1 (in Model.fit, epoch 1, step 4, running the step) has not made. Every",
        ),
        ([SUM, EVALUATE, STEP], 1, "that process 0 (in Model.fit, epoch 1, step 4, running the"),
        (
            [SUM, EVALUATE, STEP],
            1,
            ", process 2 (in Model.fit, epoch 1, step 4, running the step) ",
        ),
        # Most have made it.
        (
            [EVALUATE, SUM, EVALUATE],
            1,
            "in Model.fit, epoch 1, step 4, running the step, and has not made the call in which "
            "process 0 (in Model.evaluate (called in Model.fit)), process 2 (in Model.evaluate "
            "(called in Model.fit)) wait. Every process must make the same calls",
        ),
        # Only members of a process set make its calls.
        ([replace(EVALUATE, members=(0, 2)), SUM, SUM], 0, "a call that process 2 (in Model.fit"),
        ([EVALUATE, replace(SUM, stuck_s=59.0)], None, ""),
        # They wait in different calls: the one that has met the others less often is behind.
        (
            [Note(meetings=5, calls=("Model.fit",), waits="Model.fit", stuck_s=61.0), BATCH],
            1,
            "in Model.train_on_batch, running the step. All processes wait, for one another or a "
            "device: process 0 (in Model.fit). Every process must make the same calls",
        ),
    ],
)
def test_a_call_that_not_all_processes_have_made_is_named(notes, expected, text):
    cause = find_cause([Seen(each) for each in notes], 60.0)
    assert (None if cause is None else cause.process) == expected
    assert cause is None or text in cause.how


@pytest.mark.parametrize(
    ("phase", "silent_s", "is_cause"),
    [
        ("step", 59, False),
        ("step", 61, True),
        ("", 61, True),
        ("compile", 61, True),
        ("save", 61, False),
    ],
)
def test_a_process_that_posts_nothing_is_the_cause_whatever_the_others_do(
    phase, silent_s, is_cause
):
    seen = [Seen(note("data")), Seen(note(phase, stuck_s=0.0), silent_s)]
    cause = find_cause(seen, 60.0)
    assert (cause is not None and cause.process == 1 and cause.is_lost) == is_cause
    assert (cause is not None and "has not posted for 61 s" in cause.how) == is_cause


def test_a_script_outside_of_calls_may_be_silent_for_ten_times_as_long():
    found = [find_cause([Seen(STEP), Seen(Note(), silent_s)], 60.0) for silent_s in (599.0, 601.0)]
    assert [cause is not None and cause.is_lost for cause in found] == [False, True]


def test_a_process_that_asked_for_time_may_be_silent_for_so_long():
    seen = [Seen(STEP), Seen(note("callback", limit_s=100.0, stuck_s=0.0), 99.0)]
    assert find_cause(seen, 60.0) is None
    assert find_cause([seen[0], replace(seen[1], silent_s=101.0)], 60.0).is_lost


def test_a_limit_must_be_above_zero():
    with (
        pytest.raises(ValueError, match="limit_s must be above 0 seconds, but is 0"),
        tnt.busy("", limit_s=0),
    ):
        pass


def check(ended, who, place, *, line="exec(what)  # THE FAULT."):
    """Checks the end of a job and what was said; SIGSTOP lets a process show no stack."""
    assert set(ended.codes) == {STALLED_EXIT_CODE}, ended
    told = re.findall(
        r"ERROR: Process (\d) has (?:made no progress|not posted|not answered)[^\n]*?"
        r"|ERROR: (Process \d, which coordinates)",
        ended.output,
    )
    assert told, ended.output
    assert re.search(rf"ERROR: Process {who}(,| has) [^\n]*{place}", ended.output), ended.output
    assert {name for name, _ in told} <= {str(who), ""}, ended.output
    assert (line in ended.output) == bool(line), ended.output
    assert "Traceback" not in ended.output


@pytest.fixture(scope="module")
def stuck_in_a_callback(tmp_path_factory):
    """Returns how a job ended in which a callback is long on all processes, then stuck on one."""
    limits = {"LONG_CALLBACK_S": "7", "TNT_STALL_TIMEOUT": "4"}
    return run_faulty(tmp_path_factory.mktemp("job"), 2, SLEEP, "callback", 1, **limits)


@pytest.mark.multiprocess
def test_a_process_that_is_stuck_in_a_callback_is_named_with_its_stack(stuck_in_a_callback):
    place = r"in Model.fit, epoch 1, step 3, in Act.on_train_batch_begin"
    check(stuck_in_a_callback, 1, place)
    assert stuck_in_a_callback.seconds < 20


@pytest.mark.multiprocess
def test_a_long_callback_on_all_processes_is_no_stall(stuck_in_a_callback):
    # The job went on behind it, to the step that is stuck.
    assert "on_train_batch_begin" in stuck_in_a_callback.output
    assert "on_train_begin" not in stuck_in_a_callback.output


EVALUATES = "model.evaluate(*next(batches()), verbose=0)"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("num_processes", "what", "where", "who", "mode", "place"),
    [
        (2, EVALUATES, "callback", 0, "fit", r"in Model.evaluate \(called in Model.fit\)"),
        pytest.param(
            3, "tnt.barrier()", "callback", 1, "fit", r"in barrier \(called in Model.fit\)",
            marks=pytest.mark.long,
        ),
        pytest.param(2, "tnt.all_reduce(1)", "callback", 1, "loop", "in all_reduce",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_process_that_makes_a_call_alone_is_named_within_the_plain_limit(
    tmp_path, num_processes, what, where, who, mode, place
):
    ended = run_faulty(tmp_path, num_processes, what, where, who, mode=mode, TNT_STALL_TIMEOUT="4")
    check(ended, who, f"{place}, a call that process .* not made. Every process must make the same")
    assert ended.seconds < 20


@pytest.mark.long  # Twenty seconds; the test below names one that is stuck.
@pytest.mark.multiprocess
def test_a_process_that_is_stopped_is_named_and_killed(tmp_path):
    ended = run_faulty(tmp_path, 2, STOP, "callback", 1, TNT_STALL_TIMEOUT="4")
    assert ended.codes == [STALLED_EXIT_CODE]
    assert re.search(r"Process 1 has not posted for \d+ s: it is stopped", ended.output)
    assert ended.seconds < 30


# `test_a_process_that_is_stuck_in_a_callback_...` shows nearly the same.
@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.parametrize(
    ("num_processes", "where", "who", "mode", "by", "place"),
    [
        (2, "data", 1, "fit", "launcher", "reading data"),
        (2, "data", 1, "loop", "hand", "in its own loop, epoch 1, step 1, reading data"),
        (2, "callback", 0, "evaluate", "launcher", "in Act.on_test_batch_begin"),
        (2, "data", 1, "predict", "launcher", "in Model.predict, step 1, reading data"),
        (2, "validation", 0, "fit", "hand", r"in validation \(called in Model.fit\)"),
        (3, "epoch end", 0, "fit", "launcher", "in Act.on_epoch_end"),
        (2, "callback", 1, "loop", "launcher", "in the body of its loop"),
    ],
)
def test_a_process_is_named_wherever_it_is_stuck(
    tmp_path, num_processes, where, who, mode, by, place
):
    ended = run_faulty(
        tmp_path, num_processes, SLEEP, where, who, mode=mode, by=by, TNT_STALL_TIMEOUT="4"
    )
    check(ended, who, place)


@pytest.mark.multiprocess
@pytest.mark.long  # As above, with process 0, whose service then answers nobody.
def test_a_stopped_process_0_is_named_by_the_others(tmp_path):
    ended = run_faulty(tmp_path, 2, STOP, "callback", 0, by="hand", TNT_STALL_TIMEOUT="4")
    assert ended.codes == [STALLED_EXIT_CODE]
    assert "Process 0, which coordinates the job, has not answered process 1" in ended.output


@pytest.mark.multiprocess
@pytest.mark.long  # The judgement of a note with the phase "compile" is tested above.
def test_a_compilation_is_not_taken_for_a_stall(tmp_path):
    ended = run_faulty(
        tmp_path, 2, "time.sleep(10); os._exit(9)", "trace", 1, TNT_STALL_TIMEOUT="4"
    )
    assert ended.codes == [9], ended.output
    assert ended.seconds > 10


FAST = {"data": 1.0, "callback": 0.5, "step": 20.0}


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        ([FAST, FAST | {"data": 25.0}], (1, "data")),
        ([FAST | {"callback": 30.0}, FAST, FAST], (0, "callback")),
        ([FAST, FAST | {"step": 50.0}, FAST], (1, "step")),
        # It is slower, but by less than half, or by less than a fifth of all time.
        ([FAST, FAST | {"step": 28.0}], None),
        ([FAST, FAST | {"data": 8.0}], None),
        ([FAST | {"step": 38.0}, FAST | {"step": 53.0}], None),
        # What it spends most of its time on may be what the others do, too.
        ([{"data": 30.0, "callback": 1.0}, {"data": 32.0, "callback": 25.0}], (1, "callback")),
        # Another waits for the devices of the slow one, without knowing it.
        ([FAST | {"step": 45.0}, FAST | {"data": 40.0, "step": 6.0}], (1, "data")),
        ([FAST | {"loop": 24.0}, FAST | {"step": 44.0}], None),
    ],
)
def test_a_slow_process_is_named_with_what_it_spends_its_time_on(spent, expected):
    assert find_slow(spent, 60.0) == expected


def test_a_slow_process_is_named_once_and_not_while_programs_are_compiled():
    slow, told = SlowRanks(60.0), []
    for minute in range(5):
        seconds = dict.fromkeys(("data", "callback", "save", "step", "steps", "loop"), 0.0)
        told.append(slow.look(61.0 * minute, [seconds, seconds | {"data": 40.0 * minute}]))
    assert [text is not None for text in told] == [False, False, True, False, False]
    assert told[2] == (
        "Process 1 is slower than the others, which wait for it: of the last 61 s it spent 40.0 s "
        "reading data, the others 0.0 s at the median."
    )


def test_what_was_compared_before_does_not_count_again():
    slow = SlowRanks(60.0)
    told = [
        slow.look(60.0 * minute, [{"data": 1.0}, {"data": 1.0 + 8.0 * minute}])
        for minute in range(1, 6)
    ]
    assert told == [None] * 5


def test_times_are_compared_once_in_a_window():
    slow, seconds = SlowRanks(60.0), {"data": 1.0}
    looks = [(61.0, [seconds, seconds]), (70.0, [seconds, {"data": 40.0}])]
    assert [slow.look(*look) for look in looks] == [None, None]


def test_those_that_wait_for_a_silent_process_are_not_slow():
    slow, stopped = SlowRanks(60.0), {"step": 30.0}
    looks = [
        (60.0, [{"step": 30.0}, stopped], 5.0),
        (120.0, [{"step": 90.0}, stopped], 59.0),
        (121.0, [{"step": 91.0}, stopped], 7.0),
        # It goes on, and has counted the seconds in which it was stopped.
        (122.0, [{"step": 91.0}, {"step": 91.0}], 1.0),
    ]
    assert [slow.look(now_s, times, silent_s=old) for now_s, times, old in looks] == [None] * 4


def test_those_that_wait_for_a_process_that_has_left_its_call_are_not_slow():
    slow, left = SlowRanks(60.0), {"step": 30.0}
    looks = [
        (60.0, [left, {"step": 30.0}], ["fit", "fit"]),
        (120.0, [left, {"step": 90.0}], ["", "fit"]),
        # What was compared before both are in a call again does not count.
        (180.0, [left, {"step": 91.0}], ["fit", "fit"]),
        (240.0, [{"step": 90.0}, {"step": 150.0}], ["fit", "fit"]),
        (300.0, [{"step": 90.0}, {"step": 210.0}], ["fit", "fit"]),
    ]
    told = [slow.look(now_s, times, calls=calls) for now_s, times, calls in looks]
    assert [text is not None for text in told] == [False, False, False, False, True]


def test_a_process_that_had_not_posted_is_not_compared_by_all_of_its_time():
    slow, seconds = SlowRanks(60.0), {"data": 1.0}
    looks = [(60.0, [{}, seconds]), (120.0, [{"data": 60.0}, seconds])]
    assert [slow.look(*look) for look in looks] == [None, None]
