"""What an explanation says of measured times, each with one cause planted in it."""

import json
import math

import pytest

from tnt_jax.launch.explanation import Explanation

NAN = math.nan
# Milliseconds of a step, by kind, on two processes.
STEADY = {
    "as is": 10,
    "no callbacks": 10,
    "kept batches": 10,
    "placed batches": 10,
    "no sums": 10,
    "one rank": 10,
    "half the rows": 5,
}


def measured(changes=None, *, own=None, **facts):
    """Returns what was measured in five rounds, with a spread of 4 %, in seconds."""
    kinds = STEADY | (changes or {})
    spread = (1.0, 0.98, 1.02, 0.99, 1.01)
    seconds = {
        name: [[ms * x / 1000, (NAN if name == "one rank" else ms * x / 1000)] for x in spread]
        for name, ms in kinds.items()
    }
    if own:
        seconds["no sums"] = [[ms * x / 1000 for ms in own] for x in spread]
    facts = {
        "ranks": 2, "processes": 2, "device": "cpu", "rows": 64, "cores_of_machine": 4,
        "compiled_s": {}, "shapes": {"float32[64, 8]": 99}, "num_shapes": 1, "read_s": 1e-4,
        "read_most_s": 1e-4, "read_mean_s": 1.0,
        "first_batch_s": 1e-4, "compile_s": 1.0, "cache": "/tmp/cache", "trials": [],
        "faults": {"major": 0, "swapped": 0}, "sums": {"number": 2, "small": 1, "bytes": 4_000_000},
        "callbacks_left_out": [], "batch_bytes": 500_000, "trained_by": "fit", "steps": 20,
        "steps_of_epoch": 100,
    } | facts  # fmt: skip
    return {"seconds": seconds, **facts}


def explained(*args, **facts):
    return Explanation("train.py", json.loads(json.dumps(measured(*args, **facts))))


def trial(what, name, before, after, **more):
    times = {"before": [before] * 5, "after": [after] * 5}
    return {"what": what, "name": name, "exact": True} | times | more


def test_a_step_that_only_computes_has_no_findings():
    found = explained()
    assert found.findings == []
    assert {part.name: round(part.share, 2) for part in found.parts if part.share > 0.005} == {
        "computing": 1.0
    }
    assert found.sentence == (
        "A step takes 10 ms (9.8 ms to 10.2 ms), 6400 rows/s: computing 100 %."
    )


def test_shares_add_up_to_one_and_follow_from_differences():
    slower = {"as is": 40, "no callbacks": 36, "kept batches": 24, "placed batches": 20}
    found = explained(slower | {"no sums": 12, "one rank": 10})
    shares = {part.name: part.share for part in found.parts}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares == pytest.approx(
        {
            "compiling": 0, "callbacks": 0.1, "reading": 0.3, "placing": 0.1, "sums": 0.2,
            "waiting": 0, "sharing": 0.05, "computing": 0.25,
        }
    )  # fmt: skip
    assert found.sentence.startswith("A step takes 40 ms (39.2 ms to 40.8 ms), 1600 rows/s: ")
    assert "reading data 30 %, computing 25 %, sums 20 %" in found.sentence


def test_copying_a_small_batch_is_no_cause():
    seconds = {"as is": 20, "no callbacks": 20, "kept batches": 20}
    [named] = explained(seconds).findings
    assert named.cause == "placing"
    assert not explained(seconds, batch_bytes=100_000).findings


def test_callbacks_are_no_cause_where_the_script_has_none_that_acts_on_batches():
    found = explained({"as is": 20})
    assert "callbacks and logs 50 %" in found.sentence
    assert not found.findings


CALLBACK = trial("callback", "Slow", 0.02, 0.01)
FUSED = trial("fused", "8", 0.01, 0.004)
BUCKETS = trial("sums", "--fusion-threshold 0", 0.02, 0.012)


@pytest.mark.parametrize(
    ("changes", "facts", "cause", "text"),
    [
        ({"as is": 20}, {"trials": [CALLBACK]}, "callback", "Slow holds steps up"),
        (
            {"as is": 20},
            {"trials": [trial("callback", "Slow", 0.02, 0.02)]},
            "callback",
            "hold steps up; Slow alone acts after each",
        ),
        (
            {"as is": 20},
            {"trials": [trial("callback", name, 0.02, 0.02) for name in ("Slow", "Other")]},
            "callback",
            "no single one does",
        ),
        (
            {"as is": 20, "no callbacks": 20},
            {"read_s": 0.018},
            "reading",
            "Reading a batch takes 18 ms, longer than the rest of a step. Keep what is read in",
        ),
        (
            {"as is": 20, "no callbacks": 20},
            {},
            "reading",
            "takes time from the devices, whose processors it shares",
        ),
        (
            {"as is": 20, "no callbacks": 20, "kept batches": 10},
            {
                "compiled_s": {"as is": [0.01] * 5, "no callbacks": [0.01] * 5},
                "shapes": {"float32[64, 8]": 9, "float32[64, 9]": 8},
                "num_shapes": 2,
            },
            "recompilation",
            "because batches come in 2 shapes: float32[64, 8]; float32[64, 9]. Pad them",
        ),
        (
            {"as is": 20, "no callbacks": 20, "kept batches": 20},
            {},
            "placing",
            "copying a batch of 0.5 MB takes 10 ms of a step",
        ),
        (
            {"as is": 20, "no callbacks": 20, "kept batches": 20, "placed batches": 20},
            {"trials": [BUCKETS]},
            "sums",
            "2 exchange(s) of 4 MB take 10 ms, 3.2 Gbit/s. Use --fusion-threshold 0: tried, a step",
        ),
        (
            {"as is": 20, "no callbacks": 20, "kept batches": 20, "placed batches": 20},
            {"sums": {"number": 15, "small": 14, "bytes": 4_000}},
            "sums",
            "14 of them are below 64 KiB",
        ),
        ({"half the rows": 9}, {"trials": [FUSED]}, "small batch", "steps_per_execution=8): tried"),
        (
            {},
            {"trials": [trial("channels", "3", 0.005, 0.004)]},
            "convolution",
            "3 convolution(s) have their channels before the dimensions of space, and take 5 ms of "
            "a step. Put the channels last: tried, a step takes 10 % less (10 to 10 %).",
        ),
        ({"one rank": 5}, {}, "sharing", "all 2 at a time: they share 4 cores"),
        ({}, {"first_batch_s": 2.0}, "first batch", "as long as 200 steps"),
        ({}, {"faults": {"major": 900, "swapped": 0}}, "memory", "900 pages of the process"),
        ({}, {"cache": None, "compile_s": 30.0}, "cache", "Each start compiles for 30.0 s"),
    ],
)
def test_the_cause_is_named(changes, facts, cause, text):
    found = explained(changes, **facts).findings
    assert [finding.cause for finding in found] == [cause]
    assert text in found[0].line


def test_batches_are_small_only_where_nearly_all_rounds_say_so():
    times = measured({"half the rows": 9})
    times["seconds"]["half the rows"][:2] = [[0.005, 0.005]] * 2
    assert Explanation("train.py", times).findings == []


def test_a_slow_rank_is_named():
    slower = {"as is": 30, "no callbacks": 30, "kept batches": 30, "placed batches": 30}
    found = explained(slower, own=[10, 30])
    assert [finding.cause for finding in found.findings] == ["slow rank"]
    assert found.findings[0].text.startswith("Process 1 computes a step in 30 ms, the others in 10")
    assert "waiting for the slowest rank 33 %" in found.sentence


def test_advice_that_did_not_help_is_not_given():
    changes = {"as is": 20, "no callbacks": 20, "kept batches": 20, "placed batches": 20}
    slower = trial("sums", "--fusion-threshold 0", 0.02, 0.03)
    (finding,) = explained(changes, trials=[slower]).findings
    assert finding.advice == ""
    assert "No other form of sums that was tried is faster" in finding.line
    why = "train_step compares rows of a batch, by reduce_sum (train.py:3)"
    (finding,) = explained(changes, comparison=why).findings
    assert finding.line.endswith(f"{why}, so that the compiler chooses what is exchanged.")
    assert explained(trials=[trial("channels", "3", 0.005, 0.006)]).findings == []
    (finding,) = explained(
        {"half the rows": 9}, trials=[trial("fused", "8", 0.01, 0.0099)]
    ).findings
    assert "steps_per_execution" not in finding.line


def test_a_way_that_rounds_gradients_is_advised_only_where_no_exact_one_helps():
    changes = {"as is": 20, "no callbacks": 20, "kept batches": 20, "placed batches": 20}
    rounded = trial("sums", "Model(gradient_compression=...)", 0.02, 0.01, exact=False)
    (finding,) = explained(changes, trials=[rounded]).findings
    assert (
        "compression=...), which rounds what is sent: tried, a step takes 50 % less" in finding.line
    )
    (finding,) = explained(changes, trials=[rounded, BUCKETS]).findings
    assert "Use --fusion-threshold 0: tried" in finding.line


def test_fewer_processes_are_advised_if_they_were_faster():
    fewer = {"all": [100.0, 110.0, 90.0], "half": [150.0, 140.0, 160.0]}
    found = Explanation("train.py", measured({"one rank": 5}), fewer)
    assert "Start one process: tried, a step takes 33 % less" in found.findings[0].line
    found = Explanation("train.py", measured({"one rank": 5}, processes=4), fewer)
    assert "Start 2 processes: tried, a step takes 33 % less" in found.findings[0].line
    slower = Explanation("train.py", measured({"one rank": 5}), {"all": [100.0], "half": [90.0]})
    assert "tried" not in slower.findings[0].line


def test_an_explanation_is_kept_as_json_and_drawn_without_a_network():
    found = explained({"as is": 20}, trials=[trial("callback", "<Slow>", 0.02, 0.01)])
    again = Explanation.from_json(found.to_json())
    assert again.text == found.text
    assert json.loads(found.to_json())["shares"]["callbacks"] == 0.5
    page = found.to_html()
    assert page.count("<svg") == 2
    assert "&lt;Slow&gt; holds steps up" in page
    assert "http" not in page
    assert "<script" not in page
    with pytest.raises(ValueError, match="not that of tnt-jax explain"):
        Explanation.from_json("{}")
    other = json.dumps(json.loads(found.to_json()) | {"format": 9})
    with pytest.raises(ValueError, match=r"of format 9\. This version reads format 1"):
        Explanation.from_json(other)


def test_one_process_has_neither_sums_nor_others_to_wait_for():
    data = measured({"as is": 20}, ranks=1, processes=1)
    data["seconds"] = {
        name: [[times[0]] for times in rounds]
        for name, rounds in data["seconds"].items()
        if name != "one rank"
    }
    assert {p.name for p in Explanation("t.py", data).parts} == {
        "compiling", "callbacks", "reading", "placing", "computing",
    }  # fmt: skip


def test_local_steps_are_proposed_where_links_between_hosts_take_much_of_a_step():
    slow = {"as is": 100, "no callbacks": 100, "kept batches": 100, "placed batches": 100}
    (finding,) = [each for each in explained(slow, hosts=2).findings if each.cause == "link"]
    # 4 MB of gradients: a ring of two sends them once, local steps a quarter once in 50 steps.
    assert "The links between 2 hosts take 90 % of a step, in which each host sends 4 MB" in (
        finding.line
    )
    assert "sends 0.02 MB a step, 200 times less" in finding.line
    assert "take at least 10 ms" in finding.line
    assert "another algorithm" in finding.line
    assert finding.gain is None
    for hosts, changes in ((1, slow), (2, {"as is": 12})):
        assert "link" not in {each.cause for each in explained(changes, hosts=hosts).findings}
