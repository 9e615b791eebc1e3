"""What processes tell one another is signed with the secret of their job."""

import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from processes import environment, free_address, launch

from tnt_jax._jax.processes import SignedStore
from tnt_jax.job import check_signature, secret, sign

SECRET = "0123456789abcdef" * 4


@pytest.fixture
def shared_secret():
    """Gives this process the secret of a job; returns a function that replaces it."""
    before = secret.get()
    secret.set(SECRET.encode())
    yield secret.set
    secret.set(before)


def stored():
    """Returns a signed store, and the values that the service behind it holds."""
    values = {}
    service = SimpleNamespace(
        key_value_set=lambda key, text, allow_overwrite: values.update({key: text}),
        key_value_try_get=values.__getitem__,
        blocking_key_value_get=lambda key, timeout_ms: values[key],
        key_value_dir_get=lambda folder: [
            (key, text) for key, text in values.items() if key.startswith(folder)
        ],
        get_live_nodes=lambda processes: processes,
    )
    return SignedStore(service), values


def test_what_was_set_is_read(shared_secret):
    store, values = stored()
    store.key_value_set("a/1", "one")
    store.key_value_set("a/1", "", allow_overwrite=True)
    store.key_value_set("a/2", "naïve \x00")
    assert store.key_value_try_get("a/1") == store.blocking_key_value_get("a/1", 9) == ""
    assert store.key_value_dir_get("a") == [("a/1", ""), ("a/2", "naïve \x00")]
    assert store.get_live_nodes([0]) == [0]
    assert SECRET not in "".join(values.values())


@pytest.mark.parametrize("value", ["", "one", "0" * 64 + "one", "-" * 64 + "one", "é" * 65])
def test_what_others_wrote_is_refused(shared_secret, value):
    store, values = stored()
    values["a/1"] = value
    expected = "The key a/1 was not written by a process of this job: its signature is wrong"
    for read in (
        lambda: store.key_value_try_get("a/1"),
        lambda: store.blocking_key_value_get("a/1", 9),
        lambda: store.key_value_dir_get("a"),
    ):
        with pytest.raises(RuntimeError, match=expected):
            read()


def test_a_signature_is_for_one_key_and_one_secret(shared_secret):
    store, values = stored()
    store.key_value_set("a/1", "one")
    values["a/2"] = values["a/1"]
    with pytest.raises(RuntimeError, match="a/2 was not written"):
        store.key_value_try_get("a/2")
    shared_secret(b"another secret of thirty-two characters")
    with pytest.raises(RuntimeError, match="different values of TNT_JOB_SECRET"):
        store.key_value_try_get("a/1")


def test_a_signature_is_hmac_sha_256_of_purpose_and_data(shared_secret):
    # By: printf '3 key%s' data | openssl dgst -sha256 -hmac $SECRET
    made = subprocess.run(
        ["openssl", "dgst", "-sha256", "-hmac", SECRET], input=b"3 keydata", capture_output=True
    )
    assert made.stdout.split()[-1].decode() == sign("key", b"data").hex()
    with pytest.raises(RuntimeError):
        check_signature("keyd", b"ata", sign("key", b"data"))


def start(code, **variables):
    """Starts two processes without the launcher; returns a function for their codes and outputs."""
    job = {"TNT_COORDINATOR_ADDRESS": free_address(), "TNT_NUM_PROCESSES": "2"} | variables
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(**{name: value.split("|")[process % len(value.split("|"))] for name, value in job.items()}, TNT_PROCESS_ID=str(process)),
        )
        for process in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100)[0] for process in started]
    return [process.returncode for process in started], outputs


@pytest.mark.parametrize("values", [f"{SECRET}|{SECRET[::-1]}", f"{SECRET}|"])
def test_processes_with_different_secrets_do_not_start(values):
    began_at = time.monotonic()
    codes, outputs = start("import tnt_jax as tnt; tnt.init()", TNT_JOB_SECRET=values)
    assert all(codes)
    assert time.monotonic() - began_at < 60
    # One may end as a consequence.
    assert any("different values of TNT_JOB_SECRET" in output for output in outputs), outputs


@pytest.fixture(scope="module")
def without_secret():
    """The codes and outputs of a job that exchanges objects, and then searches."""
    return start("""
        import numpy as np, tnt_jax as tnt
        assert (tnt.get_size(), tnt.get_process_count()) == (2, 2)
        assert tnt.is_master_rank() == (tnt.get_rank() == 0)
        plain = {"a": [1, 2.5, None, True, float("inf"), "\\N{SNOWMAN}\\0"], "b": {}}
        assert tnt.all_gather_object([plain, tnt.get_rank()]) == [[plain, 0], [plain, 1]]
        assert tnt.broadcast_object("x" * 100_000) == "x" * 100_000
        for value in ((1,), {1: 2}, np.float32(1), {"a": [b""]}, type("Text", (str,), {})("x")):
            try:
                tnt.all_gather_object(value)
            except TypeError as error:
                assert "set TNT_JOB_SECRET to the same random text" in str(error), error
            else:
                raise AssertionError(value)
        assert tnt.all_gather_object((1,), process_set=tnt.ProcessSet([tnt.get_rank()])) == [(1,)]
        print("done", flush=True)
        import sys
        tnt.search.optimize(lambda: sys.exit("made"), lambda trial: 0.0)
    """)


def test_variables_join_a_job_and_objects_without_a_secret_are_plain(without_secret):
    _, outputs = without_secret
    assert ["done" in output.split() for output in outputs] == [True, True], outputs


def test_a_search_without_a_secret_says_so_before_the_study_is_made(without_secret):
    pytest.importorskip("optuna")
    codes, outputs = without_secret
    assert codes == [1, 1], outputs
    expected = "RuntimeError: tnt_jax.search.optimize passes on more than plain values between proc"
    assert all(expected in output for output in outputs), outputs
    assert "made" not in [line.strip() for output in outputs for line in output.splitlines()]


# Process 1 is the attacker: it writes to the service what it wants process 0 to unpickle.
ATTACK = """
    import base64, json, os, pathlib, pickle, sys
    import jax, numpy as np, tnt_jax as tnt
    from jax._src import distributed
    from tnt_jax import job

    class Evil:
        def __reduce__(self):
            return pathlib.Path.touch, (pathlib.Path(FILE),)

    assert tnt.all_gather_object((1, tnt.get_rank())) == [(1, 0), (1, 1)]
    assert tnt.broadcast_object({"x": np.arange(20_000)}, root_rank=1)["x"].sum() == 199990000
    if tnt.get_rank() == 1:
        HOW
    size = 5 if SMALL else 500_000
    tnt.all_gather_object((Evil() if tnt.get_rank() == 1 else 0, b"x" * size))
    print("passed")
"""


GUESSED = "job.secret.set(b'guessed')"
# Only the object is forged: what else the process tells is rightly signed.
UNSIGNED = "from tnt_jax.distributed.host import objects; objects.sign = lambda *_: bytes(32)"


@pytest.mark.parametrize(
    ("how", "size"), [(GUESSED, "small"), (UNSIGNED, "small"), (UNSIGNED, "large")]
)
def test_forged_objects_are_refused_before_they_are_unpickled(tmp_path, how, size):
    code = ATTACK.replace("HOW", how).replace("SMALL", str(size == "small"))
    code = code.replace("FILE", repr(str(tmp_path / "evil")))
    began_at = time.monotonic()
    codes, outputs = start(code, TNT_JOB_SECRET=SECRET)
    assert all(codes), outputs
    assert time.monotonic() - began_at < 60
    assert "was not written by a process of this job" in outputs[0], outputs
    assert not (tmp_path / "evil").exists()
    assert "passed" not in "".join(outputs)


def test_the_launcher_gives_a_job_a_secret_that_nobody_sees(tmp_path):
    script = tmp_path / "script.py"
    told = "import os\nsecret = os.environ['TNT_JOB_SECRET']\nprint('SECRET', secret)\n"
    checked = (
        "import pathlib, tnt_jax as tnt\n"
        "commands = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')]\n"
        "assert not any(secret.encode() in command for command in commands)\n"
        "assert secret not in repr(__import__('tnt_jax.settings').settings.read_settings())\n"
        "assert tnt.all_gather_object({secret}) == [{secret}] * 2\n"
    )
    secrets = set()
    for text in (told + checked, told):
        script.write_text(text)
        result = launch(2, script, flags=["--output-on-all-devices"])
        assert result.returncode == 0, result.stderr
        found = [line.split()[-1] for line in result.stdout.splitlines() if "SECRET" in line]
        assert [len(value) for value in found] == [64, 64]
        assert found[0] == found[1]
        secrets |= set(found)
    assert len(secrets) == 2
    result = launch(2, script, flags=["--dry-run"], TNT_JOB_SECRET=SECRET)
    assert "TNT_NUM_PROCESSES=2" in result.stdout
    assert "TNT_JOB_SECRET" not in result.stdout
    assert SECRET not in result.stdout
