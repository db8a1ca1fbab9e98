"""Pages about the code name what exists, and product code points at nothing that is not in the repository."""

import ast
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LAWS, GLOSSARY, SOURCES = DOCS / "laws.md", DOCS / "glossary.md", DOCS / "design-sources.md"
PAGES = pytest.mark.parametrize("page", [LAWS, GLOSSARY, SOURCES], ids=lambda page: page.name)
PRODUCT = (
    "autoscaler benchmarks cli contract decode_service docker engine kv_transfer kvbaton native prefill_service protos "
    "roles router serving text tools worker"
).split()
SUFFIXES = {"", ".c", ".h", ".proto", ".py", ".sh", ".toml", ".yaml"}
NO_CODES = {
    ("serving/logs.py", "C1"),
    ("engine/models/checkpoint.py", "F16"),
    ("engine/fp8/stored.py", "F8"),
}
"""The control characters of ISO 6429, and number formats of safetensors, have these names."""


def mutants() -> dict[str, str]:
    """The source of each mutant's promise ("Law 3", or a page), by the mutant's name."""
    tables = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]
    return {table["name"]: table["law"].partition(":")[0] for table in tables}


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of the second level."""
    parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def rows() -> dict[str, str]:
    """Return the tests of each row of the requirements, by its code."""
    found = re.findall(r"^\| ([A-Z][0-9]+) \| .* \| (.*) \|$", SOURCES.read_text(), flags=re.MULTILINE)
    assert len(dict(found)) == len(found), "a code has two lines"
    return dict(found)


def paths_in(text: str) -> list[str]:
    """Return the words in backticks that are paths of files."""
    return [
        word for word in re.findall(r"`([^`\s]+)`", text) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*\.[a-z]+", word)
    ]


def product_files() -> list[Path]:
    files = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path for path in files if path.suffix in SUFFIXES and "__pycache__" not in path.parts]


def docstrings_of(path: Path) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


@PAGES
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    paths = paths_in(page.read_text())
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@PAGES
def test_readme_and_architecture_link_to_the_page(page: Path) -> None:
    assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()
    assert f"({page.name})" in (DOCS / "architecture.md").read_text()


@pytest.mark.parametrize("number", range(1, 11))
def test_every_law_has_a_section_with_its_files_and_all_of_its_mutants(number: int) -> None:
    text, _, named = sections(LAWS)[f"Law {number}"].partition("**Mutants.**")
    assert "**Why.**" in text
    assert paths_in(text)
    guarding = {name for name, law in mutants().items() if law == f"Law {number}"}
    assert set(re.findall(r"`([^`]+)`", named)) == guarding


def test_there_are_ten_laws_in_order() -> None:
    assert list(sections(LAWS)) == [f"Law {number}" for number in range(1, 11)]


def test_every_row_is_there_once_and_in_order() -> None:
    lengths = {"A": 42, "B": 20, "C": 15, "D": 13, "E": 19, "F": 17, "H": 7, "M": 9, "L": 11, "P": 10}
    assert list(rows()) == [
        f"{letter}{number}" for letter, last in lengths.items() for number in range(1, last + 1)
    ]


def test_a_test_that_shows_a_row_names_its_code() -> None:
    """And no row that is not built is named by a test."""
    docstrings = {path: docstrings_of(ROOT / path) for path in set(paths_in(SOURCES.read_text()))}
    for code, where in rows().items():
        tests = [path for path in paths_in(where) if path.startswith("tests/")]
        assert tests or where.startswith(("not built", "replaced", "measured")), code
        assert [path for path in tests if not re.search(rf"\b{code}\b", docstrings[path])] == [], code


def test_every_code_of_a_docstring_has_a_row() -> None:
    """A docstring begins with its codes: ``B12: ...``, ``C4, C8, C9: ...``."""
    begin = re.compile(r"^((?:[A-Z][0-9]{1,2}(?:, |-)?)+):", flags=re.MULTILINE)
    unknown = {
        (path.name, code)
        for path in (ROOT / "tests").rglob("test_*.py")
        for codes in begin.findall(docstrings_of(path))
        for code in re.findall(r"[A-Z][0-9]+", codes)
        if code not in rows()
    }
    assert unknown == set()


def test_product_code_gives_reasons_instead_of_codes() -> None:
    pattern = re.compile(rf"\b({'|'.join(rows())}|seed 00[0-4])\b")
    found = {
        (path.relative_to(ROOT).as_posix(), code)
        for path in product_files()
        for code in pattern.findall(path.read_text())
    }
    assert found == NO_CODES


def test_product_code_points_at_pages_that_are_there() -> None:
    pattern = re.compile(r"\bdocs/[\w./-]+\.md\b|\bADR ([0-9]{4})\b")
    decisions = {path.name[:4] for path in (DOCS / "adr").glob("[0-9]*.md")}
    for path in product_files():
        for found in pattern.finditer(path.read_text()):
            page, decision = found[0], found[1]
            assert decision in decisions if decision else (ROOT / page).is_file(), (path, page)


@PAGES
def test_paragraphs_are_wrapped(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []
    assert [line for line, after in pairwise(lines) if line.startswith("#") and after] == []
