"""The list of mutants matches the code, and the tool distinguishes a guarded law from an unguarded one."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tools.mutants import (
    REPOSITORY,
    Mutant,
    apply,
    check_syntax,
    choose,
    main,
    of_rows,
    read_mutants,
    try_mutant,
)

MUTANTS = read_mutants(REPOSITORY / "tests" / "mutants.toml")
EVERY = pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
TEST = "test_law.py::test_one_is_first"
LIST = """
[[mutant]]
name = "{name}"
law = "{name}."
file = "law.py"
old = "{old}"
new = "{new}"
test = "test_law.py::test_one_is_first"
"""


def a_mutant(old: str, new: str, test: str = TEST) -> Mutant:
    return Mutant(name="m", law="One is first.", file="law.py", old=old, new=new, test=test)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A repository of one law and the test that guards it."""
    (tmp_path / "law.py").write_text("# the law\ndef first() -> int:\n    return min([1, 2, 2])\n")
    (tmp_path / "test_law.py").write_text(
        "from law import first\n\n\ndef test_one_is_first() -> None:\n    assert first() == 1\n"
    )
    (tmp_path / "tests").mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


@EVERY
def test_its_text_stands_once_in_its_file_and_can_be_replaced(mutant: Mutant) -> None:
    healthy = (REPOSITORY / mutant.file).read_text()
    mutated = apply(mutant, healthy)
    assert mutated != healthy
    check_syntax(mutant, mutated)


@cache
def names_in(path: str) -> set[str]:
    """Return the names of a file's tests, and of its state machines."""
    body = ast.parse((REPOSITORY / path).read_text()).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    machines = {ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)}
    return names | {f"{machine}::runTest" for machine in machines}


@EVERY
def test_its_test_exists(mutant: Mutant) -> None:
    path, _, name = mutant.test.partition("::")
    assert name.partition("[")[0] in names_in(path)


def test_no_law_is_without_a_mutant() -> None:
    sources = {mutant.law.partition(":")[0] for mutant in MUTANTS}
    laws = {f"Law {number}" for number in range(1, 11)}
    assert sources >= laws
    assert all((REPOSITORY / source).is_file() for source in sources - laws), sources - laws
    assert len(MUTANTS) >= 15


def test_every_row_of_the_seeds_that_is_built_has_a_mutant() -> None:
    """A row of docs/design-sources.md is built if tests show it; its mutant names it, and nothing else does."""
    page = (REPOSITORY / "docs" / "design-sources.md").read_text()
    shown = dict(re.findall(r"^\| ([A-E][0-9]+) \| .* \| (.*) \|$", page, flags=re.MULTILINE))
    built = {row for row, where in shown.items() if "`tests/" in where}
    assert len(built) > 70
    assert all(shown[row].startswith(("not built", "replaced", "measured")) for row in shown.keys() - built)
    assert {row for mutant in MUTANTS for row in mutant.seeds} == built
    assert [mutant.name for mutant in MUTANTS if len(set(mutant.seeds)) < len(mutant.seeds)] == []


@pytest.mark.parametrize(
    ("mutant", "problem"),
    [
        (a_mutant("last", "first"), "law.py contains its text 0 times instead of once"),
        (a_mutant("2", "3"), "law.py contains its text 2 times instead of once"),
        (a_mutant("min(", "min(("), "was never closed"),
        (a_mutant("min(", "missing("), "it breaks the program, not the law: NameError"),
        (a_mutant("min(", "max(", test="test_law.py::test_two"), "its test could not be run"),
    ],
    ids=["not-there", "twice", "syntax", "name", "no-test"],
)
def test_a_mutant_that_does_not_break_its_law_alone_is_a_problem(
    tiny: Path, mutant: Mutant, problem: str
) -> None:
    assert problem in str(try_mutant(mutant, tiny).problem)


@pytest.mark.slow
def test_one_that_lives_fails_the_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first one is detected, and repaired before the second one runs."""
    seen = LIST.format(name="guarded", old="min(", new="max(")
    (tiny / "tests" / "mutants.toml").write_text(seen + LIST.format(name="open", old="# the law", new="#"))
    assert main([], tiny) == 1
    first, how, second, why, last = capsys.readouterr().out.splitlines()
    assert (first.split()[0], how.strip()) == ("seen", f"assert 2 == 1 ({TEST})")
    assert (second.split()[0], why.strip()) == (
        "UNSEEN",
        f"the test passes although the law is broken ({TEST})",
    )
    assert last == "mutants: 1 of 2 were detected by their tests"


def test_they_are_chosen_by_name_or_by_chance() -> None:
    """The same seed chooses the same ones."""
    names = [mutant.name for mutant in MUTANTS[:6]]
    assert choose(MUTANTS, names[:2], None, 0) == MUTANTS[:2]
    some = choose(MUTANTS, names, 3, 7)
    assert some == choose(MUTANTS, names, 3, 7)
    assert len({mutant.name for mutant in some}) == 3
    assert len({tuple(sorted(m.name for m in choose(MUTANTS, names, 3, seed))) for seed in range(20)}) > 1
    with pytest.raises(SystemExit, match="unknown mutants: gaurded"):
        choose(MUTANTS, ["gaurded"], None, 0)


def test_they_are_chosen_by_the_rows_that_they_break() -> None:
    """All of them, those of some rows; a row that none breaks is an error and no empty run."""
    names = of_rows(MUTANTS, [])
    assert names == [mutant.name for mutant in MUTANTS if mutant.seeds]
    assert [mutant.name for mutant in MUTANTS if "B12" in mutant.seeds] == of_rows(MUTANTS, ["B12"])
    assert set(of_rows(MUTANTS, ["B12", "C7"])) == {*of_rows(MUTANTS, ["B12"]), *of_rows(MUTANTS, ["C7"])}
    with pytest.raises(SystemExit, match="no mutant breaks the rows Z9"):
        of_rows(MUTANTS, ["B12", "Z9"])


@pytest.mark.slow
def test_only_those_of_the_seeds_are_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other one would fail the run."""
    seed = LIST.format(name="of-a-row", old="min(", new="max(") + 'seeds = ["A1"]\n'
    other = LIST.format(name="open", old="# the law", new="#")
    (tiny / "tests" / "mutants.toml").write_text(seed + other)
    for arguments in (["--seeds"], ["--seeds", "A1"]):
        assert main(arguments, tiny) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "mutants: 1 of 1 were detected by their tests"


def test_a_test_that_fails_anyway_sees_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny / "tests" / "mutants.toml").write_text(LIST.format(name="guarded", old="min(", new="max("))
    (tiny / "law.py").write_text("def first() -> int:\n    return min([2])\n")
    assert main([], tiny) == 1
    assert "these tests must pass before a law is broken" in capsys.readouterr().out
