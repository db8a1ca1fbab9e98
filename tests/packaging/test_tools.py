"""The checks that ``make check`` runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_language import problems_of_code, problems_of_document
from tools.check_sizes import MAX_EXCEPTIONS, main, oversized, own_files

ROOT = Path(__file__).resolve().parents[2]


def problems(
    module: Path, source: str, excepted: tuple[str, ...] = (), *, is_test: bool = False
) -> list[str]:
    """Return what the size check finds in ``source``, without the place."""
    module.write_text(source)
    exceptions = {f"{module}:{name}": "a reason" for name in excepted}
    return [line.split(": ", 1)[1] for line in oversized(module, exceptions, is_test=is_test)]


def test_a_long_file_is_refused(tmp_path: Path) -> None:
    module = tmp_path / "long.py"
    assert problems(module, "x = 1\n" * 400) == []
    assert problems(module, "x = 1\n" * 401) == ["401 lines; a file may have 400: cut it by concern"]


def test_a_long_function_is_refused_wherever_it_hides(tmp_path: Path) -> None:
    module = tmp_path / "nested.py"
    body = "        x = 1\n"
    assert problems(module, "class A:\n    async def f(self):\n" + body * 59) == []
    assert problems(module, "class A:\n    async def f(self):\n" + body * 60) == [
        "f has 61 lines; a function may have 60"
    ]


FIELDS = "class A:\n    def __init__(self):\n" + "".join(f"        self.x{i}: int = 1\n" for i in range(11))
PRIVATE = "class A:\n" + "".join(f"    def _f{i}(self): ...\n" for i in range(9))
LONG = "class A:\n" + "    x = 1\n" * 200


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (LONG, "A has 201 lines of 200: find its second concept"),
        (FIELDS, "A has 11 fields of 10: find its second concept"),
        (PRIVATE, "A has 9 private methods of 8: find its second concept"),
    ],
)
def test_a_large_class_is_refused_unless_it_is_an_exception(
    tmp_path: Path, source: str, problem: str
) -> None:
    module = tmp_path / "large.py"
    assert problems(module, source) == [problem]
    assert problems(module, source, ("A",)) == []
    assert problems(module, source, is_test=True) == []
    smaller = source.rsplit("\n", 2)[0] + "\n"
    assert problems(module, smaller) == []
    assert problems(module, smaller, ("A",)) == ["A fits now; remove it from size_exceptions.toml"]


def test_a_parallel_assignment_is_refused_unless_it_exchanges(tmp_path: Path) -> None:
    module = tmp_path / "parallel.py"
    refused = "assign unrelated values in statements of their own"
    assert problems(module, "a, b = 1, 2\n") == problems(module, "self.a, b = x, y\n") == [refused]
    assert problems(module, "a, b = b, a + b\n") == problems(module, "a, b = f()\n") == []


def test_exceptions_only_shrink(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/d.py").write_text("x = 1\n")
    assert main(tmp_path, {}) == 0
    assert main(tmp_path, {"engine/gone.py:A": "a reason"}) == 1
    assert main(tmp_path, {f"engine/d.py:A{i}": "a reason" for i in range(MAX_EXCEPTIONS + 1)}) == 1


def test_generated_code_hidden_folders_and_builds_are_left_out(tmp_path: Path) -> None:
    for name in ("protos/a_pb2.py", ".venv/b.py", "build/c.py", "engine/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * 500)
    assert [file.name for file in own_files(tmp_path)] == ["d.py"]
    assert main(tmp_path, {}) == 1


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """The number of free blocks."""\n',
        'def f():\n    """Whether it is open."""\n',
        'class A:\n    """What a worker is made of."""\n',
        '"""Of one request."""\n',
        'LIMIT = 3\n"""How many may wait."""\n',
        'class A:\n    limit: int = 3\n    """The most requests that one worker is told of."""\n',
        'def f():\n    """Return who was told."""\n',
        "x = 1  # the sender hears of it\n",
        'logger.info("nobody is attached")\n',
        'def f():\n    raise ValueError(f"the client wants {x}")\n',
        'parser.add_argument("--x", help="whoever it is")\n',
        "def give" + "_way(): ...\n",
    ],
)
def test_code_that_must_be_translated_is_refused(source: str) -> None:
    assert len(list(problems_of_code(source, is_test=False))) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""The free blocks of one pool."""\n',
        'def f():\n    """Return the number of free blocks."""\n',
        'def f():\n    """Applies the plan."""\n',
        'def f():\n    """Read a file; ``told`` is a parameter."""\n',
        'class A:\n    @property\n    def f(self):\n        """The number of free blocks."""\n',
        'def f():\n    """GET /v1/models: list them."""\n',
        'LIMIT = 3\n"""The number of requests that may wait."""\n',
    ],
)
def test_plain_code_passes(source: str) -> None:
    assert list(problems_of_code(source, is_test=False)) == []


def test_paragraphs_of_documents_are_wrapped_and_plain() -> None:
    wide = "word " * 21 + "\n"
    assert len(list(problems_of_document(wide))) == 1
    assert list(problems_of_document(f"| {wide}```\n{wide}```\n")) == []
    assert len(list(problems_of_document("The first token is heard of.\n"))) == 1
    assert list(problems_of_document("A line.\n" * 8 + "\n" + "- A point.\n" * 20)) == []
    assert list(problems_of_document("A line.\n" * 12)) == [(9, "a paragraph has at most 8 lines")]


def test_the_lock_names_exact_versions_without_build_tags() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tools.lock"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    comment, *lines = result.stdout.splitlines()
    assert comment.startswith("#")
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", line) for line in lines)
    assert not any(line.startswith("kvbaton==") for line in lines)
    assert any(line.startswith("torch==") for line in lines)


def test_the_cuda_constraints_pin_the_same_torch() -> None:
    def pins(name: str) -> set[str]:
        lines = (ROOT / "constraints" / name).read_text().splitlines()
        return {line for line in lines if line.startswith("torch==")}

    assert pins("cuda.txt") == pins("cpu.txt") != set()


@pytest.mark.parametrize("source", ["asked = 1\n", "x = one._asked\n", "def send(asked): ...\n"])
def test_a_retired_identifier_is_refused_in_the_product(source: str) -> None:
    assert [text for _, text in problems_of_code(source, False) if "was retired" in text]
    assert not list(problems_of_code(source, True))


def test_words_of_retired_identifiers_and_no_ops_in_sentences() -> None:
    assert not list(problems_of_code('"""Return what the client asked for."""\n', False))
    assert [text for _, text in problems_of_document("A value that asks for nothing is ignored.\n")]


@pytest.mark.parametrize(
    "source",
    [
        "def take_events(self): ...\n",
        "def _taken(self) -> list[int]: ...\n",
        "def opened(send: Send) -> Step:\n    '''Lend the blocks.'''\n",
        "async def ended(self) -> None: ...\n",
        "def _begun(self) -> Iterator[None]: ...\n",
        "def finished(self) -> None:\n    '''Return nothing.'''\n",
    ],
)
def test_take_and_a_participle_are_no_names_of_actions_in_the_product(source: str) -> None:
    assert [text for _, text in problems_of_code(source, False) if text.startswith("the name")]
    assert not list(problems_of_code(source, True))
    assert not list(problems_of_code(source, False, is_product=False))


@pytest.mark.parametrize(
    "source",
    [
        "def reduced(self) -> Grammar:\n    '''Return the grammar without some parts.'''\n",
        "def _quoted(text: str) -> str: ...\n",
        "@property\ndef held(self) -> str:\n    '''The text that was read.'''\n",
        "def feed(self, data: bytes) -> None: ...\n",
        "def on_ended(self) -> None: ...\n",
        "def takes_value(word: str) -> bool: ...\n",
    ],
)
def test_a_participle_may_name_what_a_function_returns(source: str) -> None:
    assert not list(problems_of_code(source, False))
