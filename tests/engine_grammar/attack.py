"""Run one attack on a compiler in this process and print its memory growth in MB: ``python -m ... NAME``.

Each attack is a list of different grammars. One compiler compiles all of them and computes their first masks; the matchers
are then dropped, as when requests end.
"""

import json
import resource
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.sampling import Grammar
from engine.grammar.building import load_vocabulary
from engine.grammar.compiler import GrammarCompiler, Outcome
from tests.engine_grammar.answers import VOCAB_SIZE, WAIT_SECONDS, request_with
from tests.text.tiny_model import END, write_model


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def named(count: int, prefix: str = "p") -> dict[str, Any]:
    """Return ``count`` properties of the same type."""
    return {f"{prefix}{i}": {"type": "string"} for i in range(count)}


def alternatives(count: int, prefix: str) -> Any:
    """Return ``count`` choices of 8 objects each, all of which an answer must match."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"{prefix}{i}_{j}": {"type": "string"}}} for j in range(8)]}
            for i in range(count)
        ]
    }


ATTACKS: dict[str, Callable[[int], Grammar]] = {
    "counts in counts": lambda i: Grammar("regex", f"(a{{{1000 - i}}}){{1000}}"),
    "optional counts": lambda i: Grammar("regex", f"((a{{1,{1000 - i}}}){{1,1000}}){{1,1000}}"),
    "a long pattern": lambda i: Grammar("regex", "a" * (60_000 - i)),
    "many alternatives": lambda i: Grammar(
        "regex", "|".join(f"x{j}y{j * 7919 % 10007}" for j in range(5000 - i))
    ),
    "counts in a schema": lambda i: schema({"type": "string", "pattern": f"^(a{{{1000 - i}}}){{1000}}$"}),
    "a large enumeration": lambda i: schema({"enum": [f"v{j}" for j in range(6000 - i)]}),
    "many properties": lambda i: schema({"type": "object", "properties": named(1500 - i)}),
    "alternatives of alternatives": lambda i: schema(alternatives(3, f"p{i}x")),
    "a large divisor": lambda i: schema({"type": "integer", "multipleOf": 100_003 + 2 * i}),
    "many divisors": lambda i: schema(
        {
            "type": "object",
            "properties": {f"p{j}": {"type": "integer", "multipleOf": 9000 + j + i} for j in range(20)},
        }
    ),
    "a large divisor in Lark": lambda i: Grammar(
        "ebnf", f'start: %json {{"type": "integer", "multipleOf": {100_003 + 2 * i}}}'
    ),
    "counts in rules": lambda i: Grammar("ebnf", f'start: ("a"{{1,{1000 - i}}}){{1,1000}}'),
    "doubling rules": lambda i: Grammar(
        "ebnf",
        f"start: a{i}\n"
        + "".join(f"a{j}: a{j + 1} a{j + 1}\n" for j in range(i, i + 40))
        + f'a{i + 40}: "a"',
    ),
    "many answers": lambda i: Grammar("choice", json.dumps([f"{j}" for j in range(9000 - i)])),
}


def grow(folder: Path, grammars: list[Grammar]) -> int:
    """Compile all grammars and return the growth of the process in MB."""
    compiler = GrammarCompiler(lambda: load_vocabulary(folder, [END]), VOCAB_SIZE)
    compile_one(compiler, Grammar("regex", "[a-z]+"))
    before = resident_kb()
    for grammar in grammars:
        compile_one(compiler, grammar)
    return (resident_kb() - before) // 1024


def compile_one(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Compile a grammar, wait for its outcome and drop it."""
    is_ready = threading.Event()

    def take(_outcome: Outcome) -> None:
        is_ready.set()

    compiler.start(request_with(grammar), grammar, take)
    assert is_ready.wait(WAIT_SECONDS)


def resident_kb() -> int:
    """Return the resident memory of this process in kB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


if __name__ == "__main__":
    attack, count = ATTACKS[sys.argv[1]], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(f"{grow(write_model(Path(name)), [attack(i) for i in range(count)])}\n")
