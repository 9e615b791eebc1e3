"""No conditional expression holds another: those are read twice."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tnt_jax", "tests", "benchmarks", "examples", "website")


def nested(source):
    """Returns the lines of conditional expressions that are a part of another one."""
    return [
        part.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.IfExp)
        for part in (node.body, node.orelse, node.test)
        if isinstance(part, ast.IfExp)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_conditional_expression_holds_another(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(file): lines for file in files if (lines := nested(file.read_text()))} == {}


def test_a_nested_one_is_found():
    assert nested("a = 1 if b else 2\nc = 1 if b else 2 if d else 3\n") == [2]
