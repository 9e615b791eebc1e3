"""The doctor: judgements as pure functions, and the whole of it on this host."""

import dataclasses
import errno
import importlib.metadata
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from tnt_jax.distributed.host.link_probe import choose_pairs
from tnt_jax.launch.doctor import (
    FAILURE,
    OK,
    WARNING,
    _examine,
    describe,
    judge,
    judge_reachability,
    shown_environment,
    write_report,
)
from tnt_jax.launch.planning.facts import Examination, examine

REQUEST = {
    "cwd": "/",
    "script": "etc/passwd",
    "interpreter": "sh",
    "environment": {"PATH": "/usr/bin:/bin"},
}
HEALTHY = dataclasses.replace(
    Examination(**examine(REQUEST, "/none")),
    proxies=[], open_files=None, shm_mb=8000, free_disk_mb=8000, token="t", driver=None, nccl=None,
)  # fmt: skip
HEALTHY.facts.update(
    hostname="h", own_addresses=["10.0.0.1"], gpus=[], has_cuda_jax=False, missing=[]
)


def healthy(facts=None, **changes):
    return dataclasses.replace(HEALTHY, facts={**HEALTHY.facts, **(facts or {})}, **changes)


def judged(*hosts, skew=(0.0, 0.1)):
    named = {
        f"h{number}": dataclasses.replace(host, facts={**host.facts, "machine": f"m{number}"})
        for number, host in enumerate(hosts)
    }
    return judge(named, token="t", skews_s=dict.fromkeys(named, skew))


def test_healthy_hosts_have_nothing_to_mend():
    findings = judged(HEALTHY, HEALTHY)
    assert {finding.status for finding in findings} == {OK}
    assert not any(finding.remedy for finding in findings)
    topics = [
        "installation",
        "own name",
        "devices",
        "proxies",
        "limits",
        "space",
        "directory",
        "clock",
    ]
    assert [(finding.host, finding.topic) for finding in findings] == [
        (host, topic) for host in ("h0", "h1") for topic in topics
    ]


@pytest.mark.parametrize(
    ("sick", "topic", "status", "remedy"),
    [
        (
            healthy({"versions": {**HEALTHY.facts["versions"], "jax": "0.1"}}),
            "installation",
            FAILURE,
            "install the same",
        ),
        (
            healthy({"missing": ["directory /work"]}),
            "installation",
            FAILURE,
            "no directory /work there",
        ),
        (healthy({"own_addresses": ["127.0.1.1"]}), "own name", FAILURE, "/etc/hosts"),
        (
            healthy({"own_addresses": ["127.0.1.1"], "gpus": ["0"], "has_cuda_jax": True}),
            "own name",
            WARNING,
            "/etc/hosts",
        ),
        (healthy({"gpus": ["0"]}), "devices", WARNING, "pip install 'jax[cuda13]'"),
        (healthy(driver="580.65.06"), "devices", WARNING, "nvidia-smi -L"),
        (healthy(proxies=["http_proxy"]), "proxies", WARNING, "unset them"),
        (healthy(open_files=1024), "limits", WARNING, "ulimit -n 4096"),
        (healthy(shm_mb=64), "space", WARNING, "--shm-size"),
        (healthy(shm_mb=None), "space", WARNING, "--shm-size"),
        (healthy(free_disk_mb=10), "space", WARNING, "JAX_COMPILATION_CACHE_DIR"),
        (healthy(token=None), "directory", WARNING, "shared file system"),
    ],
)
def test_sick_host_is_found_with_a_remedy(sick, topic, status, remedy):
    (finding,) = [finding for finding in judged(HEALTHY, sick) if finding.status != OK]
    assert (finding.host, finding.topic, finding.status) == ("h1", topic, status)
    assert remedy in finding.remedy


def test_missing_jax_is_a_failure_even_where_all_hosts_lack_it():
    lacking = healthy({"versions": {**HEALTHY.facts["versions"], "jax": None}})
    assert [finding.status for finding in judged(lacking) if finding.topic == "installation"] == [
        FAILURE
    ]


@pytest.mark.parametrize(
    ("skew", "status"), [((1.9, 0.0), OK), ((-5.0, 0.1), WARNING), ((5.0, 4.0), OK)]
)
def test_clock_is_wrong_only_beyond_the_uncertainty(skew, status):
    assert [
        finding.status for finding in judged(HEALTHY, skew=skew) if finding.topic == "clock"
    ] == [status]


def test_host_that_another_cannot_reach_is_named_with_it():
    findings = judge_reachability(
        {"a": {"b": ["a"], "c": ["10.0.0.1"]}, "b": {"a": ["b"], "c": []}, "c": {"a": [], "b": []}}
    )
    assert [(finding.host, finding.status, finding.detail) for finding in findings] == [
        ("a", OK, "at 10.0.0.1, a"),
        ("b", FAILURE, "not from c"),
        ("c", FAILURE, "not from a, b"),
    ]
    assert judge_reachability({"a": {}})[0].status == OK


def test_table_has_a_line_for_each_remedy():
    findings = judge_reachability({"a": {"b": []}})
    assert describe(
        findings, [{"from": "a", "to": "b", "latency_us": 10.5, "bandwidth_mb_per_s": 99.0}]
    ).splitlines() == [
        "a  reachable     FAILURE  not from b",
        "                          -> Open the ports between the hosts of a job; a firewall or "
        "another network is in between.",
        "a - b: latency 10.5 us, bandwidth 99 MB/s",
    ]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 5, 9])
def test_pairs_connect_all_processes(num_processes):
    pairs = choose_pairs(num_processes)
    assert len(pairs) == (
        num_processes * (num_processes - 1) // 2 if num_processes <= 4 else num_processes
    )
    assert len(set(pairs)) == len(pairs)
    assert {rank for pair in pairs for rank in pair} == (
        set(range(num_processes)) if num_processes > 1 else set()
    )
    assert all(first < second for first, second in pairs)


@pytest.mark.multiprocess
def test_doctor_measures_this_host_and_speaks_json(run, tmp_path):
    code, out, err = run("doctor", "--no-gpu", "--json", cwd=tmp_path, timeout=120)
    assert code == 0, out + err
    found = json.loads(out)
    assert found["ok"]
    (link,) = found["links"]
    assert (link["from"], link["to"]) == ("localhost", "localhost")
    assert link["latency_us"] > 0
    assert link["bandwidth_mb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_environment_of_a_report_has_no_secrets():
    environ = {
        "HOME": "/home/ada",
        "PATH": "/home/ada/bin:/usr/bin",
        "XLA_FLAGS": "--xla_dump_to=/tmp/x",
        "TNT_JOB_SECRET": "s3cret",
        "TF_TOKEN_app": "s3cret",
        "TF_VAR_admin": "s3cret",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": "gs://ada:s3cret@bucket/cache",
        "SLURM_NTASKS": "2",
        "SLURM_JWT": "s3cret",
        "TNT_COORDINATOR_ADDRESS": "ada:s3cret@proxy:3128",
        "JAX_URL": "https://ada:s3c@re/t@host/x?api_key=s3cret&size=2",
        "TF_CONFIG": '{"password": "s3cret", "job": "a:b"}',
        "TNT_ARGS": "--api-key s3cret --no-auth --size 2 'Authorization: Bearer s3cret'",
        "PYTHONPATH": "/opt/python@3.11:/home/ada/lib",
        "WANDB_API_KEY": "s3cret",
        "https_proxy": "http://ada:s3cret@proxy:3128",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "MAIL": "/var/mail/ada",
    }
    assert shown_environment(environ) == {
        "JAX_COMPILATION_CACHE_DIR": "gs://(hidden)@bucket/cache",
        "JAX_PLATFORMS": "cpu",
        "JAX_URL": "https://(hidden)@host/x?api_key=(hidden)&size=2",
        "PATH": "~/bin:/usr/bin",
        "PYTHONPATH": "/opt/python@3.11:~/lib",
        "SLURM_JWT": "(hidden)",
        "SLURM_NTASKS": "2",
        "TF_CONFIG": '{"password": "(hidden)", "job": "a:b"}',
        "TF_TOKEN_app": "(hidden)",
        "TNT_ARGS": "--api-key (hidden) --no-auth --size 2 'Authorization: Bearer (hidden)'",
        "TNT_COORDINATOR_ADDRESS": "(hidden)@proxy:3128",
        "TNT_JOB_SECRET": "(hidden)",
        "XLA_FLAGS": "--xla_dump_to=/tmp/x",
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hub_token: s3cret, size: 2", "hub_token: (hidden), size: 2"),
        ("{password : s3cret}", "{password : (hidden)}"),
        ("X-Api-Key: s3cret", "X-Api-Key: (hidden)"),
        ("Authorization: token s3cret", "Authorization: token (hidden)"),
        ('{"Authorization": "Bearer s3cret"}', '{"Authorization": "Bearer (hidden)"}'),
        ("--auth s3cret --verbose", "--auth (hidden) --verbose"),
        ("--password 's3cret it, is' --size 2", "--password '(hidden)' --size 2"),
        ('{"api_key": "s3cret, it\'s", "size": 2}', '{"api_key": "(hidden)", "size": 2}'),
        ("token='s3cret without end", "token='(hidden)"),
        ("KeyError: 'loss'", "KeyError: 'loss'"),
        ("/opt/keys:/usr/bin", "/opt/keys:/usr/bin"),
    ],
)
def test_named_secrets_are_hidden_quoted_or_not(text, shown):
    assert shown_environment({"TNT_ARGS": text}) == {"TNT_ARGS": shown}


def test_what_the_doctor_found_is_in_a_report_without_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tnt_jax.launch.doctor._list_devices", lambda environ: "no module in /home/ada/lib"
    )
    found = {"detail": "no directory /home/ada/x there; http://ada:s3cret@proxy", "number": 1}
    diagnosis = {"ok": False, "findings": [found]}
    write_report(tmp_path / "a.json", diagnosis, {"HOME": "/home/ada"})
    written = json.loads((tmp_path / "a.json").read_text())
    detail = "no directory ~/x there; http://(hidden)@proxy"
    assert written["findings"] == [{"detail": detail, "number": 1}]
    assert written["devices"] == "no module in ~/lib"


@pytest.mark.multiprocess
def test_a_report_has_versions_devices_and_findings(run, tmp_path):
    secret = "0123456789abcdef" * 2
    environ = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "3",
        "XLA_FLAGS": "",
        "TNT_JOB_SECRET": secret,
    }
    code, out, err = run(
        "doctor", "--no-gpu", "--report", cwd=tmp_path, timeout=120, environ=environ
    )
    assert code == 0, out + err
    assert "wrote tnt_jax_report.json" in err
    (file,) = tmp_path.iterdir()
    written = json.loads(file.read_text())
    assert written["versions"]["jax"] == importlib.metadata.version("jax")
    assert [device["platform"] for device in written["devices"]] == ["cpu"] * 3
    assert written["environment"]["JAX_PLATFORMS"] == "cpu"
    assert written["ok"] is True
    assert len(written["findings"]) > 5
    assert secret not in file.read_text()


@pytest.mark.multiprocess
def test_doctor_goes_on_without_a_host_it_cannot_reach(run, tmp_path):
    (tmp_path / "hosts").write_text(f"{socket.gethostname()}\nno-such-host.invalid\n")
    code, out, _ = run("doctor", "--no-gpu", "--hostfile", tmp_path / "hosts", cwd=tmp_path)
    assert code == 1
    assert "no-such-host.invalid  connection    FAILURE" in out
    assert "Check its spelling in the hostfile" in out
    assert f"{socket.gethostname():20}  installation  ok" in out
    assert "Resolve the failures first." in out


def test_a_working_directory_that_is_read_only_ends_no_examination(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    assert _examine(SimpleNamespace(ask=lambda question, arguments: {}), {}) == ("", {})
