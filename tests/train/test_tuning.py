"""Trials of ways to sum gradients: which there are, what is advised, and that a job of them ends
with the first fit.
"""

import re
import subprocess
import sys

import flax.linen as nn
import numpy as np
import pytest
from processes import launch

import tnt_jax as tnt
from tnt_jax.distributed.sums.reduction import Reduction
from tnt_jax.settings import TrialsDone
from tnt_jax.train.timing.tuning import Candidate, Trial, advise, list_candidates

SCRIPT = """
import sys
print("jax" in sys.modules, "of", *sys.argv[1:], __name__, __file__.endswith("train.py"), sys.path[0])
import flax.linen as nn, numpy as np, tnt_jax as tnt
model = tnt.Model(nn.Dense(4))
model.compile("sgd", loss="mse")
try:
    model.fit(np.ones((16, 3), "f4"), np.ones((16, 4), "f4"), batch_size=4, verbose=0)
except Exception:
    print("an error")
finally:
    print("cleaned up in", tnt.get_size(), "ranks")
print("after fit")
"""


@pytest.fixture
def two_ranks(monkeypatch, use_ranks):
    monkeypatch.setenv("TNT_TUNE_STEPS", "2")
    use_ranks(2)


def fit(width=4, *, compile_options=None, **choices):
    model = tnt.Model(nn.Dense(width), **choices)
    model.compile("sgd", loss="mse", **(compile_options or {}))
    model.fit(
        np.ones((16, 3), np.float32), np.ones((16, width), np.float32), batch_size=4, verbose=0
    )


def trial(setting, *milliseconds, is_exact=True):
    return Trial(Candidate(setting, Reduction(), is_exact), [x / 1000 for x in milliseconds])


@pytest.mark.parametrize(
    ("trials", "advice"),
    [
        ([trial("used", 10, 11, 12), trial("a", 8, 9, 9.5), trial("b", 7, 8, 9)], "Use b"),
        # Its median is not below the fastest round of what is used.
        ([trial("used", 10, 11, 12), trial("a", 8, 10, 12)], "Keep what it uses"),
        # One percent.
        ([trial("used", 10, 10, 10), trial("a", 9.9, 9.9, 9.9)], "Keep what it uses"),
        (
            [trial("used", 10, 10, 10), trial("a", 9, 9, 9), trial("c", 5, 5, 5, is_exact=False)],
            "Use a\nFaster still.*: c$",
        ),
        (
            [trial("used", 10, 10, 10), trial("c", 5, 5, 5, is_exact=False)],
            "Keep what it uses.*\nFaster still.*: c$",
        ),
    ],
)
def test_only_what_is_faster_beyond_doubt_is_advised(trials, advice):
    assert re.match(advice, advise(trials))


def test_ways_have_one_threshold_above_the_size_of_the_gradients(two_ranks):
    model = tnt.Model(nn.Dense(1024))
    model.build((None, 1024))  # 4100 kB
    candidates = list_candidates(model._trainer, by_argument=False, accumulation_steps=1)
    assert [candidate.setting for candidate in candidates] == [
        "what it uses", "--fusion-threshold 0", "--fusion-threshold 1024",
        "--fusion-threshold 4096", "--fusion-threshold 8192",
        "--fusion-threshold xla", 'Model(gradient_compression="bfloat16")',
        "Model(shard_optimizer_state=True)",
    ]  # fmt: skip
    assert [candidate.reduction.threshold for candidate in candidates[1:6]] == [
        0,
        2**20,
        2**22,
        2**23,
        "xla",
    ]
    assert [candidate.is_exact for candidate in candidates] == [True] * 6 + [False, True]
    settings = [
        candidate.setting
        for candidate in list_candidates(model._trainer, by_argument=True, accumulation_steps=2)
    ]
    assert {"Model(fusion_threshold=1024)", "Model(fusion_threshold='xla')"} <= set(settings)
    assert "Model(shard_optimizer_state=True)" not in settings, "It does not go with accumulation."


@pytest.mark.parametrize("compile_options", [{}, {"steps_per_execution": 2}], ids=str)
def test_fit_ends_in_a_table(two_ranks, capsys, compile_options):
    with pytest.raises(TrialsDone):
        fit(compile_options=compile_options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 rank(s) on cpu, 5 rounds of 2 steps each"
    # On CPUs all sizes of buckets ask for the same program, which is tried once.
    assert [re.split(" {2,}", line)[0] for line in lines[2:5]] == [
        "what it uses", 'Model(gradient_compression="bfloat16")',
        "Model(shard_optimizer_state=True)"
    ]  # fmt: skip
    assert all(float(number) > 0 for line in lines[2:5] for number in re.findall(r"\d+\.\d+", line))


def test_there_is_nothing_to_tune_where_order_is_fixed(two_ranks):
    with pytest.raises(ValueError, match="reproducible=True the order of all additions is fixed"):
        fit(reproducible=True, virtual_ranks=2)


def test_one_rank_has_nothing_to_tune(monkeypatch):
    monkeypatch.setenv("TNT_TUNE_STEPS", "2")
    tnt.shutdown()
    tnt.init(devices=[0])
    with pytest.raises(ValueError, match=r"There is one rank.*tnt-jax tune -n 2"):
        fit()
    tnt.shutdown()


@pytest.mark.multiprocess
@pytest.mark.long  # tests/launch/test_scale.py starts scripts through the same entry.
@pytest.mark.parametrize("by_name", [False, True])
def test_the_command_tries_on_two_processes_and_trains_nothing(tmp_path, monkeypatch, by_name):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    words = ["-m", "train"] if by_name else [script]
    result = launch(2, *words, "a", flags=["--steps", "3"], command="tune", timeout_s=120)
    assert result.returncode == 0, result.stderr
    assert f"False of a __main__ True {tmp_path}" in result.stdout
    assert result.stdout.count("2 rank(s) on cpu, 5 rounds of 3 steps each") == 1, (
        "Only the master prints."
    )
    assert len(re.findall(r"^what it uses +\d", result.stdout, re.M)) == 1
    assert "cleaned up in 2 ranks" in result.stdout
    assert "an error" not in result.stdout
    assert "after fit" not in result.stdout


@pytest.mark.parametrize(("last_line", "code"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_a_script_without_fit_runs_and_ends_as_without_trials(tmp_path, last_line, code):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nprint('here')\n{last_line}\n")
    entry = [sys.executable, "-m", "tnt_jax.launch.entry", str(script)]
    result = subprocess.run(entry, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (code, "here\n"), result.stderr
