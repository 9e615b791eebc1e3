"""The fault suite of `benchmarks/`: what it takes to be right, and what it has found."""

import json
import random
import re
from pathlib import Path

import pytest
from fault_contenders import CONTENDERS
from fault_damage import damage, newest_checkpoint
from fault_kinds import KINDS, PHASES
from fault_sequences import first_epochs, in_order
from fault_starts import verdict_alone
from fault_tables import MARKS, compact, comparison, insert, read_records, table, tables
from fault_verdicts import Trial, blamed_process, saved_step, verdict
from soak import growth

ROOT = Path(__file__).parents[2]
SEQUENCE = {
    "hung": False, "left": False, "digest": "b", "epoch": 2, "lost": 0, "doubled": 0,
    "codes": [[75]], "redone": 0, "is_saved": True,
}  # fmt: skip
ALONE = {
    "hung": False, "left": False, "ended": False, "refused": True, "named": True, "lost": 0, "doubled": 0, "same": True,
}  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("target", ["the launcher", "a process"])
@pytest.mark.parametrize("fault", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "kill -9"])
def test_every_signal_is_sent_in_every_phase(fault, phase, target):
    assert KINDS[f"{fault} / {phase} / {target}"].action == "outside"


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("kill -9 / training / a process", {}, ""),
        ("kill -9 / training / a process", {"redone": 4, "codes": [], "is_saved": False}, ""),
        ("kill -9 / training / a process", {"digest": "a"}, "other weights"),
        ("kill -9 / training / a process", {"digest": None}, "did not go on"),
        ("kill -9 / training / a process", {"lost": 1}, "rows lost or doubled"),
        ("kill -9 / training / a process", {"doubled": 1}, "rows lost or doubled"),
        ("kill -9 / training / a process", {"hung": True}, "hung"),
        ("kill -9 / training / a process", {"left": True}, "left processes"),
        ("SIGTERM / training / the launcher", {}, ""),
        ("SIGTERM / training / the launcher", {"codes": [[143]]}, "ended with another code"),
        ("SIGTERM / training / the launcher", {"redone": 1}, "not saved"),
        ("SIGTERM / training / a process", {"codes": []}, ""),
        ("SIGTERM / training / a process", {"is_saved": False}, "not saved"),
    ],
)
def test_a_trial_of_a_sequence_is_judged(kind, change, expected):
    assert verdict({**SEQUENCE, **change}, KINDS[kind], ["a", "b"]) == expected


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("data / a process", {}, ""),
        ("data / a process", {"ended": True}, "not refused"),
        ("data / a process", {"refused": False}, "not refused by all alike"),
        ("data / a process", {"named": False}, "did not name the process"),
        ("data / a process", {"hung": True}, "hung"),
        ("wrong number of processes", {"named": None}, ""),
        ("resume with one process", {"ended": True}, ""),
        ("resume with one process", {}, "did not go on"),
        ("resume with one process", {"ended": True, "lost": 2}, "rows lost or doubled"),
        ("resume with one process", {"ended": True, "same": False}, "other weights"),
        ("resume with half the batch", {"ended": True, "same": False}, ""),
        ("stop_training / a process", {"ended": True, "same": None}, ""),
    ],
)
def test_a_trial_with_starts_of_its_own_is_judged(kind, change, expected):
    assert verdict_alone({**ALONE, **change}, KINDS[kind]) == expected


def test_faults_while_programs_are_compiled_follow_those_that_end_the_job():
    names = [
        "slow / training / a process", "kill -9 / compilation / a process", "disk full / training",
        "SIGTERM / compilation / the launcher",
    ]  # fmt: skip
    ordered = in_order([Trial("tnt_jax", KINDS[name], 0, seed=0) for name in names])
    assert [trial.kind.name for trial in ordered] == [names[1], names[3], names[0], names[2]]
    assert first_epochs(ordered) == [1, 2, 3, 7, 10]


def test_trials_draw_the_same_process_again():
    trials = [Trial("tnt_jax", KINDS["slow / training / a process"], n, seed=0) for n in range(20)]
    drawn = [trial.process for trial in trials]
    assert drawn == [trial.process for trial in trials]
    assert set(drawn) == {0, 1}


def test_the_step_that_a_job_has_saved_is_read_from_its_output():
    line = "SIGTERM came to process 1: the state after step 5 of epoch 3 is saved. Ending with"
    assert saved_step([(1.0, "x"), (2.0, line)]) == (2.0, 2 * 16 + 5)
    assert saved_step([(1.0, "x")]) is None


@pytest.mark.parametrize(
    ("contender", "line", "process"),
    [
        ("tnt_jax", "[tnt-jax] Rank 1 on localhost failed with exit code 1.", 1),
        ("tnt_jax", "[tnt_jax] ERROR: Process 0 has not posted for 8 s: it is stopped", 0),
        ("tnt_jax", "WARNING: Process 0 has waited 5 s in Model.fit, for process 1 (in a", None),
        ("tnt_jax", "[tnt-jax] Process 0 has left the job (KeyError: 1). Rank 1 on localhost", 0),
        ("tnt_jax", "[tnt_jax] WARNING: SIGTERM came to process 1: the state after step 6", 1),
        ("pytorch", "api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 31083) of", 1),
    ],
)
def test_the_process_that_is_blamed_is_found_in_the_output(contender, line, process):
    found = blamed_process(CONTENDERS[contender].named, [(0.0, "Nothing."), (1.0, line)])
    assert found == process


def checkpoints(folder):
    for number in (9, 10):
        (folder / "fit-1" / f"tnt_jax_backup_{number}").mkdir(parents=True)
        (folder / "fit-1" / f"tnt_jax_backup_{number}" / "array").write_bytes(bytes(range(100)))
    (folder / "fit-1" / "tnt_jax_backup_11.orbax-checkpoint-tmp").mkdir()
    return newest_checkpoint(folder)


def test_damage_is_done_to_the_newest_complete_checkpoint(tmp_path):
    newest = checkpoints(tmp_path)
    assert newest.name == "tnt_jax_backup_10"
    assert damage(newest, "flipped bit", random.Random(0)) == "tnt_jax_backup_10/array"
    flipped = int.from_bytes((newest / "array").read_bytes()) ^ int.from_bytes(bytes(range(100)))
    assert flipped.bit_count() == 1
    damage(newest, "truncated file", random.Random(0))
    assert (newest / "array").stat().st_size == 50
    damage(newest, "deleted file", random.Random(0))
    assert not list(newest.iterdir())


def test_tables_count_what_went_wrong(tmp_path):
    kind = "kill -9 / training / a process"
    common = {"kind": kind, "lost": 0, "doubled": 0, "named": True, "noticed_s": 1.0, "back_s": 5.0}
    records = [
        {**common, "contender": "tnt_jax", "wrong": ""},
        {**common, "contender": "tnt_jax", "wrong": "", "back_s": 7.0, "named": False},
        {**common, "contender": "pytorch", "wrong": "hung", "lost": 3, "back_s": None},
    ]
    (tmp_path / "record").write_text("".join(json.dumps(record) + "\n" for record in records))
    records = read_records(tmp_path / "record")
    ours = table(records[:2]).splitlines()[2]
    assert ours == (
        "| kill -9: a process | 2 | 0 | 0 | 0 | 0 | 0 | 1 of 2 | 1.0, at most 1.0 | "
        "6.0, at most 7.0 |"
    )
    assert comparison(records).splitlines()[2] == (
        "| kill -9: a process | 2 of 2 right | 0 of 1 right, 1 hung (3 rows lost, 0 doubled) |"
    )


def test_a_trial_that_was_set_aside_is_told_and_not_counted():
    common = {
        "contender": "tnt_jax", "kind": "kill -9 / training / a process", "lost": 0, "doubled": 0,
        "named": True, "noticed_s": 1.0, "back_s": 5.0,
    }  # fmt: skip
    records = [
        {**common, "wrong": "", "load": 3.0},
        {**common, "wrong": "", "load": 9.0},
        {**common, "wrong": "hung", "load": 80.0, "void": "The machine slept."},
    ]
    text = tables(records)
    assert "| **all** | 2 | 0 |" in text
    assert "after the trials: 6.0, at most 9.0;" in text
    assert "Set aside, and repeated: kill -9 / training / a process (hung). The machine" in text


def test_growth_of_a_soak_is_found_and_flat_lines_are_not():
    def sampled(role, pid, slope):
        return [
            {"role": role, "pid": pid, "time": second, "megabytes": 100 + slope * second / 60,
             "threads": 9, "files": 20}
            for second in range(600)
        ]  # fmt: skip

    short = [{**sample, "pid": 3} for sample in sampled("training", 3, 50)[:100]]
    grown = growth(sampled("training", 1, 0.5) + sampled("launcher", 2, 0.0) + short)
    assert grown["training"]["megabytes"] == pytest.approx(0.5)
    assert grown["launcher"] == {"megabytes": 0, "threads": 0, "files": 0}


def test_the_kinds_have_names_of_their_own_and_contenders():
    assert len({re.sub(r"\W+", "", name) for name in KINDS}) == len(KINDS)
    assert all("tnt_jax" in kind.contenders for kind in KINDS.values())


def test_of_a_trial_that_went_right_no_output_is_kept():
    record = {"kind": "x", "digest": "a", "told": "b", "named": True}
    assert compact(record, "") == {"kind": "x", "named": True}
    assert compact(record, "hung") == record
    assert compact({**record, "named": False}, "") == {**record, "named": False}


def test_a_table_replaces_what_is_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"a\n{MARKS[0]}\nold\n{MARKS[1]}\nb\n")
    for text in ("new", "newer"):
        insert(text, page)
        assert page.read_text() == f"a\n{MARKS[0]}\n\n{text}\n\n{MARKS[1]}\nb\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="needs lines <!-- faults: begin -->"):
        insert("new", page)


def test_the_tables_of_the_documentation_are_those_of_the_records():
    records = [
        record
        for name in ("faults", "faults_peers")
        for record in read_records(ROOT / "benchmarks" / "results" / f"{name}.jsonl")
    ]
    assert tables(records) in (ROOT / "docs" / "fault_trials.md").read_text()
