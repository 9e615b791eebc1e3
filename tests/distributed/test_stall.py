"""Who waits says for whom, instead of standing still without a word."""

import re

import pytest
from processes import SCRIPTS, launch

from tnt_jax.distributed.liveness.phases import Note
from tnt_jax.distributed.liveness.watch import describe_stall

FIT = Note(3, ("Model.fit",), epoch=1, step=4)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        # One is behind.
        (
            FIT,
            Note(2, ()),
            r"0 has waited 60 s in Model.fit, epoch 1, step 4 for process 1 \(in no such call\)",
        ),
        (
            FIT,
            Note(3, ("Model.fit",), epoch=1, step=3),
            r"for process 1 \(in Model.fit, epoch 1, step 3\)",
        ),
        (
            Note(4, ("Model.fit", "Model.predict")),
            FIT,
            r"in Model.predict \(called in Model.fit\) for process 1 \(in Model.fit",
        ),
        (FIT, Note(9, has_left=True), r"for process 1 \(at the end of its script\)"),
        # Both are at the same place, and one waits or may wait for the other.
        (
            Note(3, ("Model.fit",), waits="sum of gradients"),
            Note(3, ("Model.fit",)),
            r"\(sum of gradients\) for process 1",
        ),
        (Note(3, ("Model.fit",), phase="step"), Note(3, ("Model.fit",)), r"for process 1"),
        (
            Note(3, ("Model.fit",), waits="sum"),
            Note(3, ("Model.fit",), waits="sum"),
            r"for process 1",
        ),
        (Note(3, waits="barrier"), Note(3), r"in barrier for process 1 \(in no such call\)"),
        # It waits among processes to which the other does not belong.
        (
            Note(3, waits="barrier", members=(0, 2)),
            Note(3),
            r"in barrier for process 2 \(in barrier\)",
        ),
        # Nobody is waited for: both compile, or this process is the one that is behind or has left.
        (Note(3, ("Model.fit",), phase="step"), Note(3, ("Model.fit",), phase="step"), None),
        (FIT, FIT, None),
        (FIT, Note(4, ("Model.fit", "Model.predict"), waits="Model.predict"), None),
        (Note(9, has_left=True), FIT, None),
    ],
)
def test_who_is_waited_for(own, other, expected):
    text = describe_stall([Note(**vars(own) | {"stuck_s": 60.0}), other, own], 0)
    assert (text is None) == (expected is None), text
    assert expected is None or re.search(expected, text), text


@pytest.mark.long  # Twenty seconds of waiting.
@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_call_that_waits_names_the_process_it_waits_for():
    result = launch(2, SCRIPTS / "stalls.py", timeout_s=120, TNT_STALL_WARNING_S="1")
    told = re.findall(
        r"WARNING: (Process \d has waited \d+ s .*?)\. Every process must make the same calls in "
        r"the same",
        result.stderr,
    )
    told = [re.sub(r"waited \d+ s", "waited", text) for text in told]
    for expected in [
        r"Process 0 has waited in Model.predict for process 1 \(in no such call\)",
        r"Process 1 has waited in barrier for process 0 \(in no such call\)",
        r"Process 0 has waited in Model.fit, epoch 1, step \d \(sum of gradients\) for process 1 "
        r"\(in Model.fit, epoch 1, step 2, in Late.on_train_batch_begin\)",
        r"Process 0 has waited in Model.fit, epoch 2, step \d.* for process 1 \(in Model.fit, "
        r"epoch 2, step 2, in Late.on_train_batch_begin\)",
        r"Process 1 has waited in Model.fit, epoch 1, step 8 \(end of epoch 1\) for process 0",
        r"Process 0 has waited in Model.fit, epoch 1, step \d \(data of process 1\) for process 1",
        r"Process 0 has waited in Model.predict for process 1 \(at the end of its script\)",
    ]:
        assert any(re.match(expected, text) for text in told), (expected, told, result.stderr)
    assert "all came" in result.stdout
    # One that has left never comes: the call fails.
    assert result.returncode == 1
    assert "RuntimeError: Process 0 has waited" in result.stderr
