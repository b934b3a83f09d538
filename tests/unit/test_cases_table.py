"""`docs/cases.md` names tests that exist. They are looked for in the sources, not run."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "cases.md"
#: Suites that are shipped; classes in `tests/` inherit their tests.
SUITES = ROOT / "src" / "kvterrace" / "testing"
STATES = ("held", "in part. Not yet: ", "not yet: ")


def rows() -> list[list[str]]:
    """The cells of each row that is a case."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| C")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(text: str) -> list[str]:
    return re.findall(r"`(tests/[^`]*)`", text)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path)


def definitions(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """What defines `name`: a function, a class, or `TestX = Machine.TestCase`."""
    for node in body:
        match node:
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) | ast.ClassDef(name=found):
                if found == name:
                    yield node
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Attribute(attr="TestCase")):
                if found == name:
                    yield node
            case _:
                pass


def methods(cls: ast.ClassDef, path: Path) -> set[str]:
    """Names of the functions of a class and of those that it inherits from, in its own file or in a shipped suite."""
    found = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    for base in cls.bases:
        if isinstance(base, ast.Name):
            for file in (path, *sorted(SUITES.glob("*.py"))):
                for node in definitions(parsed(file).body, base.id):
                    if isinstance(node, ast.ClassDef):
                        found |= methods(node, file)
    return found


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    outer, _, inner = name.partition("::")
    if not outer.lower().startswith("test") or not path.name.startswith("test_") or not path.is_file():
        return False
    for node in definitions(parsed(path).body, outer):
        if not inner:
            return not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.ClassDef) and inner.startswith("test_") and inner in methods(node, path):
            return True
    return False


def test_the_look_up_tells_what_exists() -> None:
    assert exists("tests/unit/test_cases_table.py::test_the_look_up_tells_what_exists")
    assert exists("tests/unit/test_io_contract.py::TestPosixEngine::test_errors_are_results")  # inherited
    assert exists("tests/unit/test_ladder_contract.py::TestSsdOnFiles::test_threads_share_a_store")  # over two classes
    assert exists("tests/property/test_store_machine.py::TestStore")
    for wrong in (
        "tests/unit/test_cases_table.py",
        "tests/unit/test_cases_table.py::rows",
        "tests/unit/test_cases_table.py::test_nothing",
        "tests/unit/test_nothing.py::test_nothing",
        "tests/unit/test_io_contract.py::TestPosixEngine",
        "tests/unit/test_io_contract.py::TestPosixEngine::test_nothing",
        "tests/unit/test_io_contract.py::test_errors_are_results",
        "tests/crash/kit.py::checked",
    ):
        assert not exists(wrong), wrong


def test_every_case_has_one_row_and_says_how_far_it_is_held() -> None:
    table = rows()
    assert [row[0] for row in table] == [f"C{number}" for number in range(1, 25)]
    for name, what, _, state, tests in table:
        assert what, name
        assert state.startswith(STATES) and (state == "held") == ("ot yet" not in state), f"{name}: {state}"
        assert named(tests) or state.startswith("not yet: "), f"{name} names no test"
        assert "`" not in re.sub(r"`tests/[^`]*`", "", tests), f"{name}: something that is no test"


def test_every_named_test_exists() -> None:
    tests = named(TABLE.read_text())
    missing = [test for test in tests if "::" in test and not exists(test)]
    assert not missing
    assert len(tests) > 60
    assert all((ROOT / test).is_file() for test in tests if "::" not in test)
