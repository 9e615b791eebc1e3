"""`tnt.verify`: what it passes on, and what it says when nothing was compared."""

import pytest
from processes import SCRIPTS, environment

import tnt_jax as tnt
from tnt_jax.launch import notebook


def test_what_the_command_says_is_in_the_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"Nothing was compared:\n.*each number once, but got 1"):
        tnt.verify(tmp_path / "none.py", ranks=[1, 1])


@pytest.mark.multiprocess
@pytest.mark.long
def test_a_script_is_compared_from_python(monkeypatch):
    monkeypatch.setattr(notebook.os, "environ", environment())
    options = ["--no-gpu", "--processes-per-node", "1"]
    receipt = tnt.verify(
        SCRIPTS / "train_planted.py", ranks=[1, 2], steps=2, arguments=["rate"], options=options
    )
    assert not receipt.is_good
    assert "2 times those of the reference" in repr(receipt)
