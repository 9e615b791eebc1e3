import dataclasses

import pytest

from tnt_jax.launch.planning.facts import (
    Facts,
    choose_address,
    find_obstacles,
    find_remedy,
    find_unreachable,
    inspect_host,
    ssh_address,
)

FACTS = Facts.from_json(
    inspect_host("/", "etc/passwd", "sh", environment={"PATH": "/usr/bin:/bin"})
)


def facts(**changes):
    return dataclasses.replace(FACTS, **changes)


def test_equal_hosts_are_no_obstacle():
    assert find_obstacles({"a": FACTS, "b": facts(hostname="b")}) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"versions": {**FACTS.versions, "jax": "0.9.0"}},
            "jax is 0.9.0 there, but .* install the same",
        ),
        ({"versions": {**FACTS.versions, "jaxlib": None}}, "jaxlib is not installed there"),
        ({"python": "3.7.1"}, r"Python is 3.7 there, but 3\.1"),
        (
            {"missing": ("script /x.py", "interpreter py")},
            "no script /x.py and no interpreter py there",
        ),
    ],
)
def test_host_that_differs_is_named(changes, message):
    (reason,) = find_obstacles({"a": FACTS, "b": facts(**changes)}).items()
    assert reason[0] == "b"
    with pytest.raises(ValueError, match=message):
        raise ValueError(reason[1])


def test_another_patch_of_python_is_no_obstacle():
    assert find_obstacles({"a": facts(python="3.11.1"), "b": facts(python="3.11.9")}) == {}


@pytest.mark.parametrize(
    ("addresses", "is_trap"),
    [
        (("127.0.1.1",), True),
        (("::1", "127.0.0.1"), True),
        ((), True),
        (("10.0.0.1",), False),
        (("127.0.1.1", "10.0.0.1"), False),
    ],
)
def test_loopback_host_name_is_named_where_cpus_meet(addresses, is_trap):
    hosts = {
        "a": facts(own_addresses=("10.0.0.9",)),
        "b": facts(hostname="b.org", machine="b", own_addresses=addresses),
    }
    found = find_unreachable(hosts, "cpu")
    assert list(found) == (["b"] if is_trap else [])
    assert all("b.org its network address" in reason for reason in found.values())
    assert find_unreachable(hosts, "gpu") == {}


def test_nodes_of_one_machine_reach_each_other_by_any_name():
    trapped = facts(own_addresses=("127.0.1.1",))
    assert find_unreachable({"a": trapped, "a#2": trapped}, "cpu") == {}


@pytest.mark.parametrize(
    ("reachable", "expected"),
    [
        ({"b": ["x", "y"], "c": ["x", "y"]}, ("x", [])),
        ({"b": ["y"], "c": ["x", "y"]}, ("y", [])),
        ({"b": ["x"], "c": []}, ("x", ["c"])),
        ({"b": [], "c": []}, ("x", ["b", "c"])),
    ],
)
def test_address_that_all_reach_is_chosen(reachable, expected):
    assert choose_address(["x", "y"], reachable) == expected


def test_addresses_leave_out_those_that_lead_back():
    found = facts(ssh_address="10.0.0.7", own_addresses=("127.0.1.1", "10.0.0.7", "fd00::7"))
    assert found.addresses("ada@node7") == ["node7", "10.0.0.7", "fd00::7"]
    assert found.addresses("localhost") == ["10.0.0.7", "fd00::7"]


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("ada@n: Permission denied (publickey).", "ssh-copy-id n"),
        ("ssh: Could not resolve hostname n: Name or service not known", "Check its spelling"),
        ("bash: line 1: /opt/py: No such file or directory", "same Python environment"),
        ("env: python: command not found", "same Python environment"),
        ("ssh: connect to host n port 22: Connection timed out", "firewall"),
    ],
)
def test_known_reasons_come_with_a_remedy(reason, hint):
    assert hint in find_remedy("n", reason)


def test_unknown_reason_has_no_remedy():
    assert find_remedy("n", "strange") == ""


def test_what_is_missing_is_found(tmp_path):
    def missing(**request):
        usual = {"cwd": str(tmp_path), "interpreter": "sh", "environment": {"PATH": "/bin"}}
        return inspect_host(**(usual | request))["missing"]

    (tmp_path / "s.py").write_text("")
    assert missing(script="s.py") == ()
    assert missing(script="t.py") == (f"script {tmp_path}/t.py",)
    assert missing(script="s.py", interpreter="nothing") == ("interpreter nothing",)
    assert missing(script="s.py", interpreter="") == (f"permission to execute {tmp_path}/s.py",)
    assert missing(script="s.py", cwd="/none") == ("directory /none",)


def test_ssh_address_is_the_servers():
    assert ssh_address({"SSH_CONNECTION": "10.0.0.1 55760 10.0.0.2 22"}) == "10.0.0.2"
    assert ssh_address({}) is None
