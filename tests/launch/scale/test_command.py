"""`tnt-jax scale`: what it refuses, where it places ranks, and whole runs of it."""

import json
import os
import signal

import pytest
from processes import environment

from tnt_jax.launch.planning.options import Scale, parse_options
from tnt_jax.launch.remote.hosts import HostEntry
from tnt_jax.launch.scale.projection import Outer
from tnt_jax.launch.scale.scaling import MARK, Scaling
from tnt_jax.launch.trials import Layout, Listener, _Table, check_folder, lay_out, marked

SCRIPT = """
import sys
import flax.linen as nn, numpy as np, tnt_jax as tnt
class Saves(tnt.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise SystemExit("A callback has run.")
model = tnt.Model(nn.Dense(4), sync=eval((sys.argv[1:] or ["None"])[0]))
model.compile("sgd", loss="mse")
print("no end of this line", end="")
try:
    model.fit(np.ones((50, 3), "f4"), np.ones((50, 4), "f4"), batch_size=8, callbacks=[Saves()])
except Exception:
    print("an error")
open("after", "w")
"""


def parse(*words):
    return parse_options(("scale", *words), version="1")


def test_options_of_scale():
    options = parse("--ranks", "4", "1", "2", "--weak", "--rounds", "5", "--no-gpu", "--", "t.py")
    assert options.scale == Scale((1, 2, 4), rounds=5, is_weak=True)
    assert options.ends_early
    assert options.devices_per_node is None
    assert parse("--ray", "--ranks", "1", "--", "t.py").ray_devices is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", "2"), "-n cannot be used with tnt-jax scale"),
        (("--max-restarts", "1"), "--max-restarts cannot be used"),
        (("--checkpoint-dir", "d"), "--checkpoint-dir cannot be used"),
        (("--ranks", "2", "2"), "each number once, but got 2 2"),
        (("--run-timeout", "0"), "must be above 0"),
        (("--tune",), "--tune needs a number of ranks above 1"),
        (("--link-gbit", "1"), "only valid together with --project"),
        (("--python-interpreter", ""), "scale runs a Python script"),
    ],
)
def test_options_without_meaning_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse("--ranks", "1", *words, "--", "t.py")


def test_a_projection_goes_beyond_what_is_measured():
    assert parse("--ranks", "1", "2", "--project", "8", "--", "t.py").scale.project == 8
    with pytest.raises(ValueError, match=r"--project \(2\) must be above.*\(1 2\)"):
        parse("--ranks", "1", "2", "--project", "2", "--", "t.py")


def test_ranks_are_required(capsys):
    with pytest.raises(SystemExit):
        parse("--", "t.py")
    assert "--ranks" in capsys.readouterr().err


ENTRIES = [HostEntry("a", slots=2), HostEntry("b", slots=2), HostEntry("c", slots=2)]


@pytest.mark.parametrize(
    ("ranks", "names", "per_host"), [(1, "a", 1), (2, "a", 2), (4, "ab", 2), (6, "abc", 2)]
)
def test_ranks_fill_host_after_host(ranks, names, per_host):
    layout = lay_out(ranks, ENTRIES, (2, 2, 2))
    assert layout == Layout(tuple(HostEntry(name) for name in names), per_host)


@pytest.mark.parametrize(
    ("ranks", "per_host", "message"),
    [
        (8, (2, 2, 2), r"--ranks 8 needs as many devices, but the 3 host\(s\) have 6"),
        (3, (2, 2, 2), "--ranks 3 cannot be shared evenly.*above 2, name multiples of 2"),
        (4, (2, 1, 2), "--ranks 4 cannot be shared evenly by hosts with 2, 1, 2"),
    ],
)
def test_ranks_that_do_not_fit_the_hosts_are_refused(ranks, per_host, message):
    with pytest.raises(ValueError, match=message):
        lay_out(ranks, ENTRIES, per_host)


def test_a_folder_with_content_is_refused(tmp_path):
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "er")
    assert not (tmp_path / "new").exists(), "It is made with the results."
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="exists already, and what it holds is kept"):
        check_folder(tmp_path)
    with pytest.raises(ValueError, match="exists already"):
        check_folder(tmp_path / "mine")
    with pytest.raises(ValueError, match="cannot be made"):
        check_folder(tmp_path / "mine" / "new")


def test_what_was_measured_is_found_in_whatever_pieces_it_comes(capsysbinary):
    listener, in_table = Listener(marked(MARK), shows=False), Listener(_Table(), shows=False)
    table = b"2 rank(s) on cpu, 5 rounds of 3 steps each\nway  ms\nUse a\n"
    for piece in (b"loss 0.1\rtnt-jax", b" scale: no\n" + MARK[:9].encode(), MARK[9:].encode()):
        listener.write(0, "stdout", piece)
        in_table.write(0, "stdout", piece)
    assert listener.kept == []
    listener.write(0, "stdout", b"{}\n")
    listener.write(1, "stdout", MARK.encode() + b"of another\n")
    listener.write(0, "stderr", MARK.encode() + b"of another\n")
    in_table.write(0, "stdout", b"{}\n" + table)
    assert listener.kept == [f"{MARK}{{}}"]
    assert in_table.kept == table.decode().splitlines()
    assert capsysbinary.readouterr() == (b"", b"")


@pytest.mark.multiprocess
def test_a_signal_ends_the_run_and_all_that_follow(tnt_jax, script, tmp_path):
    os.mkfifo(tmp_path / "begun")
    text = f"open({str(tmp_path / 'begun')!r}, 'w').close()\nimport time; time.sleep(600)"
    words = ["scale", "--ranks", 1, "--no-gpu", "--output", tmp_path / "o", "--", script(text)]
    process = tnt_jax(*words)
    open(tmp_path / "begun").close()  # Waits for the script.
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert err.count("Round") == 1
    assert not (tmp_path / "o").exists()


LOCAL = "tnt.LocalSteps(every=4, fragments=2, groups='process')"
# A whole number of rounds is timed; two messages hold the rows twice, and all 64 bytes once.
OUTER = Outer(ranks=1, every=4, fragments=2, delay=0, mb=(64 + 2 * 8) / 1e6)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("sync", "steps", "outer"),
    [("None", 9, None), pytest.param(LOCAL, 12, OUTER, marks=pytest.mark.long)],
    ids=["together", "in groups"],
)
def test_a_script_is_measured_on_one_and_two_ranks(
    sync, steps, outer, run, script, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = ["scale", "--ranks", 1, 2, "--no-gpu", "--rounds", 1, "--steps", 9, "--weak"]
    folder = tmp_path / "results"
    code, out, err = run(
        *words, "--output", folder, "--", script(SCRIPT), sync, timeout=200,
        environ=environment(TNT_CHECKPOINT_DIR=str(tmp_path / "c")),
    )  # fmt: skip
    assert code == 0, err
    assert out.startswith("script.py") or "weak scaling" in out.splitlines()[0]
    assert [line.split()[:2] for line in out.splitlines()[2:4]] == [["1", "8"], ["2", "16"]]
    assert "A callback" not in err + out
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "results"}
    scaling = Scaling.from_json((folder / "scaling.json").read_text())
    assert [(r.ranks, r.steps, r.rows, r.gradient_bytes, r.outer) for r in scaling.runs] == [
        (1, 9, 72, 64, None),
        (2, steps, 16 * steps, 64, outer),
    ]
    for measured in scaling.runs:
        shares = measured.shares
        total = shares.compute + shares.communication + shares.data + shares.host
        assert total == pytest.approx(1)
        assert shares.compute > 0
        assert (shares.communication > 0) == (measured.ranks > 1 and outer is None)
    assert json.loads((folder / "scaling.json").read_text())["weak"] is True


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("text", "limit_s", "message"),
    [
        ("print('no fit here')", 50, "has ended without a call of fit"),
        ("1 / 0", 50, "division by zero"),
        ("import time; time.sleep(600)", 1, "did not end in time"),
    ],
    ids=["without fit", "with an error", "without an end"],
)
def test_scripts_that_cannot_be_measured(run, script, tmp_path, text, limit_s, message):
    words = ["scale", "--ranks", 1, "--no-gpu", "--rounds", 2, "--run-timeout", limit_s]
    code, out, err = run(*words, "--output", tmp_path / "o", "--", script(text), timeout=60)
    assert code == 1
    assert message in err
    assert err.count("Round") == 1, "It is not tried again."
    assert "error: nothing was measured." in err
    assert out == ""
    assert not (tmp_path / "o").exists()


@pytest.mark.multiprocess
@pytest.mark.long
def test_a_script_is_measured_on_a_cluster_of_ray(run, script, tmp_path, ray_cluster):
    words = ["scale", "--ray", "--ray-address", ray_cluster.address, "--ranks", 1, 2, "--no-gpu"]
    folder = tmp_path / "results"
    code, out, err = run(
        *words, "--rounds", 1, "--steps", 3, "--output", folder, "--", script(SCRIPT),
        timeout=300, environ=environment(),
    )  # fmt: skip
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines()[2:4]] == [["1", "8"], ["2", "8"]]
    scaling = Scaling.from_json((folder / "scaling.json").read_text())
    assert [(r.ranks, r.processes, r.rows) for r in scaling.runs] == [(1, 1, 24), (2, 2, 24)]


@pytest.mark.multiprocess
@pytest.mark.long
def test_more_ranks_than_a_cluster_of_ray_has_are_left_out(run, script, tmp_path, ray_cluster):
    words = ["scale", "--ray", "--ray-address", ray_cluster.address, "--ranks", 1, 50, "--no-gpu"]
    code, out, err = run(
        *words, "--rounds", 1, "--steps", 3, "--run-timeout", 60, "--", script(SCRIPT),
        timeout=300, environ=environment(),
    )  # fmt: skip
    assert code == 1
    assert out.splitlines()[2].split()[:2] == ["1", "8"]
    assert "50 rank(s) are left out: Ray: the wait of 60 s was in vain, for " in err
