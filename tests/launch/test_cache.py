"""Compiled programs are kept where nobody else can put any."""

import os

import pytest

from tnt_jax.files import UnsafeFolder, private_folder
from tnt_jax.launch.planning import facts as facts_module
from tnt_jax.launch.planning.facts import Facts, cache_dir, find_missing_caches, inspect_host


def test_cache_dir_follows_the_xdg_specification(tmp_path):
    assert cache_dir({"XDG_CACHE_HOME": "/x", "HOME": str(tmp_path)}) == "/x"
    assert cache_dir({"HOME": str(tmp_path)}) == f"{tmp_path}/.cache"


@pytest.mark.parametrize("home", ["", "/nonexistent", "open"])
def test_without_a_home_of_ones_own_the_cache_is_private(tmp_path, monkeypatch, home):
    asked = []
    monkeypatch.setattr(
        facts_module, "private_folder", lambda path: asked.append(path) or "private"
    )
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    home = str(tmp_path / "open") if home == "open" else home
    assert cache_dir({"HOME": home}) == "private"
    assert asked == [f"/tmp/tnt_jax-{os.geteuid()}"]


def make_file(path):
    path.write_text("")


def make_link(path):
    (path.parent / "theirs").mkdir(mode=0o700)
    path.symlink_to(path.parent / "theirs")


def make_open(path):
    path.mkdir()
    path.chmod(0o770)


def test_a_private_folder_is_made_and_used_again(tmp_path):
    path = str(tmp_path / "mine")
    assert private_folder(path) == path
    assert os.stat(path).st_mode & 0o777 == 0o700
    os.chmod(path, 0o755)
    assert private_folder(path) == path
    assert os.stat(path).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("make", [make_file, make_link, make_open])
def test_what_others_can_write_to_is_no_private_folder(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(UnsafeFolder, match="x is no directory that this user alone can write to"):
        private_folder(str(tmp_path / "x"))


def test_somebody_elses_folder_is_no_private_folder(tmp_path, monkeypatch):
    path = str(tmp_path / "x")
    assert private_folder(path) == path
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UnsafeFolder, match="this user alone"):
        private_folder(path)


def test_a_place_that_cannot_be_made_is_no_private_folder(tmp_path):
    with pytest.raises(UnsafeFolder, match=r"missing/x cannot be made \(No such file"):
        private_folder(str(tmp_path / "missing" / "x"))


def test_a_host_without_a_cache_is_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "theirs").write_text("")
    monkeypatch.setattr(
        facts_module, "cache_dir", lambda environ: private_folder(str(tmp_path / "theirs"))
    )
    facts = {"node1": Facts.from_json(inspect_host(str(tmp_path), "train.py", "python", {}))}
    (warning,) = find_missing_caches(facts)
    assert warning.startswith("Compiled programs are not kept on node1: ")
    assert "theirs is no directory" in warning
