"""Every block of Python in the documentation runs, with the names and commands it mentions."""

import re
import sys
from functools import reduce
from types import ModuleType

import pytest
from pages import PAGES, ROOT, blocks, run
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax.launch.planning.options import parse_options

WITH_BLOCKS = [page for page in [ROOT / "README.md", *PAGES] if blocks(page)]
NAMED = re.compile(r"\btnt\.([a-zA-Z_][\w.]*\w)")


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_one_after_another(page, use_ranks, tmp_path, monkeypatch):
    if "\nimport torch" in page.read_text():
        pytest.importorskip("torch", reason="needs PyTorch")
    if "\nfrom datasets import" in page.read_text():
        pytest.importorskip("datasets", reason="needs Hugging Face's datasets")
    use_ranks(2)
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}")
    # Saving a model looks up the module of its class.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert run(page, vars(module)) > 0


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_pages_about_processes_run_in_two(tmp_path):
    names = ["ranks", "from_horovod"]
    done = launch(2, SCRIPTS / "run_pages.py", tmp_path, *names)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"{name} has run" in done.stdout for name in names)


def test_pages_name_only_what_is_there():
    pages = [ROOT / "README.md", *PAGES]
    names = {(page.stem, name) for page in pages for name in NAMED.findall(page.read_text())}
    assert len(names) > 100
    assert {(page, name) for page, name in names if not is_there(name)} == set()


def is_there(name):
    try:
        reduce(getattr, name.split("."), tnt)
    except AttributeError:
        return False
    return True


COMMANDS = [
    line
    for page in [ROOT / "README.md", *PAGES]
    for line in re.findall(r"tnt-jax [^`\n]*?-- [^`\n|&]*", page.read_text())
]


def test_commands_have_options_that_the_launcher_knows():
    assert len(COMMANDS) > 10
    for line in COMMANDS:
        assert parse_options(line.split()[1:], version="") is not None, line
