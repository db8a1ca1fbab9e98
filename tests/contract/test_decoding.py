"""Typed decoders are safe in threads: msgspec alone ends the process when two threads first use a type at once."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_PRODUCT = {"tests", "benchmarks", "tools", "examples", ".venv"}

FIRST_USES = """
import sys, threading
from typing import Annotated
import msgspec
from contract.decoding import converter, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)
positive = Annotated[int, msgspec.Meta(ge=0)]
short = Annotated[str, msgspec.Meta(max_length=100)]

def use(kind, data):
    barrier.wait()
    if sys.argv[1] == "msgpack":
        value = msgpack_decoder(kind).decode(data)
    elif sys.argv[1] == "json":
        value = json_decoder(kind).decode(b'{"a": 1}')
    else:
        value = converter(kind)({"a": 1})
    right.append(value.a == 1)

right = []
for _ in range(200):
    class Message(msgspec.Struct):
        a: positive = 0
        b: short | None = None
        c: list[positive] = []
        d: dict[str, positive] = {}
        e: tuple[int, str, float] = (1, "", 1.0)
    data = msgspec.msgpack.encode(Message(1, "x", [1], {"a": 1}))
    barrier = threading.Barrier(6)
    threads = [threading.Thread(target=use, args=(Message, data)) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
assert len(right) == 1200 and all(right)
"""


@pytest.mark.parametrize("how", ["msgpack", "json", "convert"])
def test_threads_that_first_use_a_type_at_once_do_not_end_the_process(how: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_USES, how], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_typed_decoders_are_made_in_one_place_only() -> None:
    files = [path for path in ROOT.glob("*/**/*.py") if path.relative_to(ROOT).parts[0] not in NO_PRODUCT]
    assert len(files) > 100
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if path != ROOT / "contract" / "decoding.py"
        for line in unsafe_uses(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "msgspec.json.decode(data, type=Kind)",
        "partial(msgspec.msgpack.decode, type=Kind)",
        "msgspec.json.Decoder(Kind)",
        "msgspec.convert(data, Kind)",
    ],
)
def test_unsafe_uses_are_found(source: str) -> None:
    assert list(unsafe_uses(source)) == [1]


def unsafe_uses(source: str) -> Iterator[int]:
    """Yield the lines on which msgspec decodes to a type, or a typed decoder is made."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        mentioned = {ast.unparse(part) for part in (node.func, *node.args)}
        is_typed = any(keyword.arg == "type" for keyword in node.keywords)
        decodes = mentioned & {"msgspec.json.decode", "msgspec.msgpack.decode"}
        makes = {"msgspec.convert", "msgspec.json.Decoder", "msgspec.msgpack.Decoder"} & mentioned
        if makes or (decodes and is_typed):
            yield node.lineno
