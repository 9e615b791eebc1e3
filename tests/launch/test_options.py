import sys

import pytest

from tnt_jax.launch.planning.options import parse_options


def parse(*argv):
    return parse_options(argv, version="1")


def test_defaults():
    options = parse("train.py")
    assert (options.script, options.script_args, options.interpreter) == (
        "train.py",
        (),
        (sys.executable,),
    )
    assert (
        options.devices_per_node,
        options.use_gpus,
        options.log_level,
        options.compilation_cache,
    ) == (None, True, None, True)


@pytest.mark.parametrize(
    "argv",
    [
        ("-n", "2", "--", "train.py", "-n", "3", "--", "x"),
        ("-n", "2", "train.py", "-n", "3", "--", "x"),
    ],
)
def test_everything_after_the_script_is_its_own(argv):
    options = parse(*argv)
    assert (options.devices_per_node, options.script, options.script_args) == (
        2,
        "train.py",
        ("-n", "3", "--", "x"),
    )


def test_every_option():
    options = parse(
        "--hostfile", "h", "--n-per-node", "4", "--processes-per-node", "2", "--no-gpus",
        "--log-level", "info",
        "--log-on-all-devices", "--output-on-all-devices", "--fusion-threshold", "0",
        "--pin-memory-to-socket", "--log-dir", "l",
        "--port", "99", "--grace-period", "1.5", "--no-compilation-cache", "--dry-run", "-x", "A=1",
        "B=", "-x", "C=x y=z",
        "--checkpoint-dir", "runs/a", "--checkpoint-every", "5m",
        "--ssh-args", "-F 'my config' -p 2", "--python-interpreter", "valgrind python -u", "--",
        "t.py",
    )  # fmt: skip
    assert (
        options.hostfile,
        options.devices_per_node,
        options.processes_per_node,
        options.use_gpus,
    ) == ("h", 4, 2, False)
    assert (options.log_level, options.log_on_all_devices, options.output_on_all_devices) == (
        "INFO",
        True,
        True,
    )
    assert (options.fusion_threshold_kb, options.pin_to_socket, options.pin_memory_to_socket) == (
        0,
        True,
        True,
    )
    assert (options.log_dir, options.port, options.grace_period_s, options.dry_run) == (
        "l",
        99,
        1.5,
        True,
    )
    assert options.exports == (("A", "1"), ("B", ""), ("C", "x y=z"))
    assert options.ssh_args == ("-F", "my config", "-p", "2")
    assert options.interpreter == ("valgrind", "python", "-u")
    assert not options.compilation_cache
    assert (options.checkpoint_dir, options.checkpoint_every) == ("runs/a", "5m")


def test_n_means_this_host_but_with_a_hostfile_each_host():
    assert parse("-n", "2", "t.py").this_host_only
    assert not parse("-n", "2", "--hostfile", "h", "t.py").this_host_only
    assert not parse("--devices-per-node", "2", "t.py").this_host_only


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("-n", "2", "--n-per-node", "2", "t.py"), "Use either -n or --devices-per-node"),
        (("--force", "t.py"), "--force is only valid together with --cleanup"),
        ((), "A script is required"),
        (("-x", "A", "--", "t.py"), "-x must be followed by NAME=VALUE, but got 'A'"),
        (("-x", "A=1", "t.py"), "but got 't.py'. If that is the script, put -- before it"),
        (("-x", "2A=1", "--", "t.py"), "NAME=VALUE"),
    ],
)
def test_contradictions_are_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("-n", "0", "t.py"),
        ("-n", "two", "t.py"),
        ("--fusion-threshold", "-1", "t.py"),
        ("--npernode", "2", "t.py"),
        ("--checkpoint-every", "0", "t.py"),
        ("--checkpoint-every", "often", "t.py"),
    ],
)
def test_wrong_values_and_unknown_options_end_the_program(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(*argv)
    assert "usage: tnt-jax" in capsys.readouterr().err


def test_plan_is_the_first_word_and_has_one_process(capsys):
    options = parse("plan", "-n", "8", "--no-gpu", "--", "t.py", "plan")
    assert (options.is_plan, options.devices_per_node, options.processes_per_node) == (True, 8, 1)
    assert options.script_args == ("plan",)
    assert not parse("-n", "8", "--", "plan").is_plan
    with pytest.raises(ValueError, match="plan runs a Python script"):
        parse("plan", "--python-interpreter", "", "--", "t.sh")
    with pytest.raises(SystemExit, match="2"):
        parse("plan", "--steps", "7", "--", "t.py")


def test_tune_is_the_first_word_and_has_steps(capsys):
    options = parse("tune", "-n", "2", "--steps", "7", "--", "t.py", "--steps", "3")
    assert (options.tune_steps, options.devices_per_node, options.script_args) == (
        7,
        2,
        ("--steps", "3"),
    )
    assert parse("tune", "t.py").tune_steps == 20
    assert parse("--", "tune").tune_steps is None
    with pytest.raises(ValueError, match="tune runs a Python script"):
        parse("tune", "--python-interpreter", "", "--", "t.sh")
    with pytest.raises(SystemExit, match="2"):
        parse("--steps", "7", "--", "t.py")


def test_version_and_help_need_no_script(capsys):
    for argv, text in (("--version", "1"), ("--help", "one per line")):
        with pytest.raises(SystemExit, match="0"):
            parse(argv)
        assert text in capsys.readouterr().out


def test_cleanup_needs_no_script():
    assert parse("--cleanup").cleanup == ""
    assert parse("--cleanup", "job-1", "--force").cleanup == "job-1"


def test_ray_takes_the_number_of_processes_for_the_whole_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = parse("--ray", "-n", "8", "--min-devices", "4", "train.py")
    assert (options.ray_address, options.ray_devices, options.min_devices) == ("auto", 8, 4)
    assert options.devices_per_node is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert parse("--ray", "-n", "8", "train.py").ray_address == "10.0.0.1:6379"
    assert parse("--ray", "-n", "8", "--ray-address", "b:1", "train.py").ray_address == "b:1"
    assert parse("-n", "8", "train.py").ray_address is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--ray", "train.py"), "--ray needs -n, the number of processes"),
        (("--ray", "-n", "2", "--hostfile", "h", "train.py"), "--hostfile cannot be used .* --ray"),
        (("--ray", "-n", "2", "--min-hosts", "1", "train.py"), "--min-hosts .* --min-devices says"),
        (("--ray", "-n", "2", "--cleanup"), "--cleanup cannot be used .* leaves nothing behind"),
        (
            ("--ray", "-n", "2", "--min-devices", "3", "train.py"),
            r"--min-devices \(3\) must not be above -n \(2\)",
        ),
        (("-n", "2", "--min-devices", "1", "train.py"), "only valid together with --ray"),
        (("--ray-address", "a:1", "train.py"), "only valid together with --ray"),
    ],
)
def test_options_that_contradict_ray_are_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--min-processes", "2", "train.py"), "only valid together with --elastic"),
        (("tune", "--elastic", "train.py"), "--elastic cannot be used with tnt-jax tune"),
        (("plan", "--elastic", "train.py"), "--elastic cannot be used with tnt-jax plan"),
        (("verify", "--elastic", "train.py"), "--elastic cannot be used with tnt-jax verify"),
        (("explain", "--elastic", "train.py"), "--elastic cannot be used with tnt-jax explain"),
        (
            ("scale", "--ranks", "1", "2", "--elastic", "--", "train.py"),
            "--elastic cannot be used with tnt-jax scale",
        ),
    ],
)
def test_an_elastic_job_where_there_can_be_none_is_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        parse(*argv)
