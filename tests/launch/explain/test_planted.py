"""`tnt-jax explain` names the cause that was planted in a script, and advice that has held."""

import os
import shutil

import pytest
from planted_causes import PLANTED, run


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first(name, tmp_path):
    planted = PLANTED[name]
    if planted.link and (os.getuid() or not all(map(shutil.which, ("unshare", "ip", "tc")))):
        pytest.skip("A slow link needs unshare, ip and tc, and the rights of root.")
    found = run(name, str(tmp_path / "found"))
    assert found["findings"], found["sentence"]
    first = found["findings"][0]
    assert first["cause"] == planted.cause, found["findings"]
    assert planted.text in first["line"]
