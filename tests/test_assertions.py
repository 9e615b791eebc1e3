"""Every test asserts something: itself, or by a function of the tests that does."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
# Checks of libraries whose names say so.
OUTSIDE = ("assert_", "raises", "fail", "warns", "run_doctest", "testmod")


class Function:
    """A function or method of the tests.

    Attributes:
        file: Where it stands.
        name: Its name.
        called: Names that it calls or hands on.
        asserts: Whether it asserts itself.
    """

    def __init__(self, file, node):
        parts = list(ast.walk(node))
        self.file, self.name = file, node.name
        self.called = {part.id for part in parts if isinstance(part, ast.Name)}
        self.called |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
        self.asserts = any(isinstance(part, ast.Assert) for part in parts) or any(
            name.startswith(OUTSIDE) for name in self.called
        )


def functions(files):
    return [
        Function(file, node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def without_assertion(files):
    """Returns the tests that neither assert nor call, through others, a function that does."""
    silent, asserting = functions(files), set()
    while True:
        # Of functions that share a name all must assert, since a call does not tell them apart.
        still = [
            one for one in silent if not one.asserts and not one.called & asserting - {one.name}
        ]
        named = {one.name for one in silent} - {one.name for one in still}
        if named <= asserting:
            return sorted(
                f"{one.file.name}::{one.name}" for one in still if one.name.startswith("test_")
            )
        asserting |= named


def test_every_test_asserts_something():
    assert without_assertion(TESTS.rglob("*.py")) == []


def test_a_test_without_an_assertion_is_found(tmp_path):
    file = tmp_path / "test_x.py"
    file.write_text(
        "def check(x):\n    assert x\n"
        "def test_by_itself():\n    assert 1\n"
        "def test_by_another():\n    check(1)\n"
        "def test_nothing():\n    print(1)\n"
    )
    assert without_assertion([file]) == ["test_x.py::test_nothing"]
