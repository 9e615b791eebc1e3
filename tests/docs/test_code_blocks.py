"""Every code block says what it is: Python runs (`test_pages.py`), a diff runs on both sides
(`test_diffs.py`), commands are ones that there are, `text` is what a program prints. A block that
does not run says why, in a comment above it.
"""

import re
import shlex
import tomllib

import pytest
from pages import PAGES, ROOT, fences, not_run

from tnt_jax.launch.planning.options import parse_options

FILES = [
    *PAGES,
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *(ROOT / "examples").rglob("README.md"),
]
KINDS = {"python", "diff", "sh", "text", "yaml"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Programs of the extras, of the system and of the shell.
PROGRAMS = {
    "export",
    "srun",
    "pytest",
    "pre-commit",
    "lint-imports",
    "import-linter",
    "mkdocs",
    "dot",
    "ray",
    "kubectl",
    ".",
    "nox",
}
COMMANDS_OF_TNT_JAX = {"doctor", "fingerprint", "tune"}


def relative(page):
    return str(page.relative_to(ROOT))


def test_blocks_have_a_kind():
    found = [(relative(page), kind) for page in FILES for kind, _ in fences(page)]
    assert len(found) > 100
    assert [(page, kind) for page, kind in found if kind not in KINDS] == []


def test_a_block_that_does_not_run_says_why():
    reasons = [reason for page in FILES for reason in not_run(page).values()]
    assert [reason for reason in reasons if len(reason.split()) < 3] == []


COMMANDS = [
    (relative(page), command.strip())
    for page in FILES
    for kind, text in fences(page)
    if kind == "sh"
    for line in text.replace("\\\n", " ").splitlines()
    for command in re.split(r"&&|\||;", line)
    if command.strip()
]


def test_commands_are_those_that_there_are():
    assert len(COMMANDS) > 30
    problems = [(page, command, problem_of(command)) for page, command in COMMANDS]
    assert [problem for problem in problems if problem[-1] is not None] == []


def problem_of(command):
    words = shlex.split(command, comments=True)
    while "=" in words[0]:  # Variables of the environment.
        words = words[1:]
    program, *arguments = words
    if program == "tnt-jax":
        if arguments[0] not in COMMANDS_OF_TNT_JAX:
            assert parse_options(arguments, version="") is not None
        return None
    if program == "pip":
        named = set(re.findall(r"\w+", " ".join(re.findall(r"\[(.*?)\]", " ".join(arguments)))))
        return f"no such extras: {named - set(EXTRAS)}" if named - set(EXTRAS) else None
    if program == "python":
        file = next((word for word in arguments if word.endswith(".py")), None)
        return f"no file {file}" if file and not (ROOT / file).exists() else None
    return None if program in PROGRAMS else f"unknown program {program}"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("pip install -e .[nope]", "no such extras"),
        ("python benchmarks/none.py", "no file"),
        ("nonesuch --now", "unknown program"),
    ],
)
def test_a_command_that_is_not_there_is_found(command, problem):
    assert problem in problem_of(command)
