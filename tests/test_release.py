"""What states the version or the dependencies a second time says the same."""

import re
import tomllib
from pathlib import Path

import yaml

import tnt_jax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_files_of_a_release_have_its_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    recipe = yaml.safe_load((ROOT / ".conda/recipe.yaml").read_text())
    assert cited["version"] == tnt_jax.__version__ == recipe["context"]["version"]
    assert cited["license"] == PROJECT["license"] == recipe["about"]["license"]
    assert f"## {tnt_jax.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_recipe_asks_for_what_the_package_asks_for():
    recipe = yaml.safe_load((ROOT / ".conda/recipe.yaml").read_text())
    # What conda-forge calls flatbuffers is the library of C++.
    needed = {
        text.replace(" ", "").removeprefix("python-") for text in recipe["requirements"]["run"]
    }
    needed -= {"__linux", "python>=${{python_min}}"}
    assert needed == set(PROJECT["dependencies"])
    assert PROJECT["requires-python"] == f">={recipe['context']['python_min']}"
    (command,) = recipe["build"]["python"]["entry_points"]
    assert command == f"tnt-jax = {PROJECT['scripts']['tnt-jax']}"


def test_the_supported_versions_are_those_of_the_page_and_of_the_classifiers():
    page = (ROOT / "docs/stability.md").read_text()
    low, high = re.search(r"Python (3\.\d+) to (3\.\d+)", page).groups()
    minors = range(int(low[2:]), int(high[2:]) + 1)
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert listed == [f"3.{minor}" for minor in minors]
    assert PROJECT["requires-python"] == f">={low}"


def test_forms_for_issues_ask_for_a_report_that_the_doctor_writes():
    forms = [*(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")]
    fields = {path.stem: yaml.safe_load(path.read_text()).get("body", []) for path in forms}
    for name in ("bug", "wish"):
        assert any(
            "tnt-jax doctor --report" in field["attributes"]["label"] for field in fields[name]
        )
