import pytest

from tnt_jax.launch.remote.hosts import (
    HostEntry,
    allocated_hosts,
    parse_hostfile,
    read_hostfile,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", [HostEntry("node1")]),
        ("node1\n\n  \nnode2\n", [HostEntry("node1"), HostEntry("node2")]),
        ("# all\nnode1 slots=4 # fast\n", [HostEntry("node1", 4)]),
        ("b\na\nb\n", [HostEntry("b"), HostEntry("a")]),
        ("ada@node1.example.org slots=2\n10.0.0.1\n[fd00::1]\n",
         [HostEntry("ada@node1.example.org", 2), HostEntry("10.0.0.1"), HostEntry("[fd00::1]")]),
        ("node1 slots = 3\r\nnode2\r\n", [HostEntry("node1", 3), HostEntry("node2")]),
    ],
)  # fmt: skip
def test_parse_hostfile(text, expected):
    assert parse_hostfile(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no host"),
        ("# only a comment\n", "lists no host"),
        ("node1 slots=0", "line 1: after the host name only slots=N"),
        ("node1\nnode2 4", "line 2: after the host name only slots=N"),
        ("-oProxyCommand=evil", "is not a host name"),
        ("node1;rm", "is not a host name"),
        (
            "node1 slots=2\nnode1 slots=3",
            "line 2: node1 is already listed with another number of slots",
        ),
    ],
)
def test_malformed_hostfile_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_hostfile(text)


def test_missing_hostfile_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"The hostfile .*/none cannot be read: .*No such file"):
        read_hostfile(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"The hostfile .* cannot be read: .*Is a directory"):
        read_hostfile(str(tmp_path))


def test_allocated_hosts_are_reached_through_srun():
    assert allocated_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}) == [
        HostEntry("n1", through="srun"),
        HostEntry("n2", through="srun"),
    ]
    assert allocated_hosts({}) == []
