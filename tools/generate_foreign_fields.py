"""Write router/http/fields/foreign.py: the request fields of other servers that this one does not serve.

Usage: python -m tools.generate_foreign_fields FOLDER

FOLDER holds what the servers publish: wheels of vLLM and SGLang (``pip download --no-deps``), TGI's docs/openapi.json as
``tgi-VERSION-openapi.json``, and the names in llama.cpp's tools/server/server-schema.cpp as ``llama.cpp-COMMIT.txt``, each
on a line with ``=`` and the JSON of its default if there is one. The packages ``openai`` and ``anthropic`` are those of this
environment. Nothing is imported: the classes of requests are read from their source.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from router.http.bodies.body import UNSERVED
from router.http.schema.chat import CHAT
from router.http.schema.completion import COMPLETION
from router.http.schema.messages import MESSAGE
from router.http.schema.responses import RESPONSE

PAGE = Path(__file__).resolve().parent.parent / "router" / "http" / "fields" / "foreign.py"
Fields = dict[str, list[Any]]
"""Name → its default values."""
_HEAD = '''"""Request fields of other servers that this one does not serve, with their defaults, which are no-ops.

Written on {date} by ``python -m tools.generate_foreign_fields`` from the request classes of
{peers}.
"""

from typing import Any

PEER_FIELDS: dict[str, tuple[Any, ...]] = {{
'''
_WHEELS = {
    "vllm": {
        "vllm/entrypoints/openai/chat_completion/protocol.py": ["ChatCompletionRequest"],
        "vllm/entrypoints/openai/completion/protocol.py": ["CompletionRequest"],
    },
    "sglang": {"sglang/srt/entrypoints/openai/protocol.py": ["ChatCompletionRequest", "CompletionRequest"]},
}
_PACKAGES = {
    "openai": {
        "types/chat/completion_create_params.py": ["CompletionCreateParamsBase"],
        "types/completion_create_params.py": ["CompletionCreateParamsBase"],
    },
    "anthropic": {"types/message_create_params.py": ["MessageCreateParamsBase"]},
}
_TGI = ("ChatRequest", "CompletionRequest", "GenerateParameters")
_SERVED = {
    name
    for described in (CHAT, COMPLETION, MESSAGE, RESPONSE)
    for name, field in described["properties"].items()
    if UNSERVED not in field
}


def main(folder: Path) -> int:
    """Write the module from the files in ``folder``, and return the exit status."""
    found: Fields = {}
    peers = []
    for name, fields in sorted(_sources(folder), key=lambda source: source[0]):
        peers.append(name)
        for field, defaults in fields.items():
            found.setdefault(field, []).extend(defaults)
    lines = [
        f"    {json.dumps(name)}: ({_listed(_spellings(defaults))}),"
        for name, defaults in sorted(found.items())
        if name not in _SERVED
    ]
    date = datetime.now(tz=UTC).date().isoformat()
    PAGE.write_text(_HEAD.format(date=date, peers=", ".join(peers)) + "\n".join(lines) + "\n}\n")
    return 0


def _sources(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield each server with its version, and the fields of its requests."""
    for package, files in _WHEELS.items():
        for path in folder.glob(f"{package}-*.whl"):
            with zipfile.ZipFile(path) as wheel:
                modules = [(wheel.read(name).decode(), classes) for name, classes in files.items()]
            yield f"{package} {path.name.split('-')[1]}", _of_modules(modules)
    for package, files in _PACKAGES.items():
        spec = find_spec(package)
        assert spec and spec.origin, package
        root = Path(spec.origin).parent
        modules = [((root / name).read_text(), classes) for name, classes in files.items()]
        yield f"{package} {version(package)}", _of_modules(modules)
    for path in folder.glob("tgi-*-openapi.json"):
        schemas = json.loads(path.read_text())["components"]["schemas"]
        described = [item for name in _TGI for item in schemas[name]["properties"].items()]
        # its defaults are texts, and others than false ask for something
        idle: Fields = {name: [False] if field.get("default") == "false" else [] for name, field in described}
        yield f"tgi {path.name.split('-')[1]}", idle
    for path in folder.glob("llama.cpp-*.txt"):
        pairs = [line.partition("=") for line in path.read_text().split("\n") if line]
        yield (
            path.stem.replace("-", " "),
            {name: _of(json.loads(value or "null")) for name, _, value in pairs},
        )


def _spellings(defaults: list[Any]) -> list[str]:
    """Return the defaults as source, each once; a number that is whole as an integer and with a fraction."""
    both = [
        [int(one), float(one)] if type(one) in (int, float) and one == int(one) else [one] for one in defaults
    ]
    return sorted({repr(one) for group in both for one in group})


def _listed(spellings: list[str]) -> str:
    """Return the inside of a tuple. Without a last comma, so that the formatter leaves two spellings on one line."""
    return f"{spellings[0]}," if len(spellings) == 1 else ", ".join(spellings)


def _of(default: Any) -> list[Any]:
    return [] if default is None else [default]


def _of_modules(modules: list[tuple[str, list[str]]]) -> Fields:
    found: Fields = {}
    for source, names in modules:
        classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
        for name in names:
            for field, defaults in _of_class(classes[name], classes):
                found.setdefault(field, []).extend(defaults)
    return found


def _of_class(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the public annotated fields of a class and of its bases in the same module."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _of_class(classes[base.id], classes)
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            is_private = part.target.id.startswith("_") or "ClassVar" in ast.unparse(part.annotation)
            if not is_private:
                yield part.target.id, _of(_default_of(part.value))


def _default_of(value: ast.expr | None) -> Any:
    """Return the constant that is a field's default; None if there is none, or if it is made by a call."""
    if isinstance(value, ast.Call):
        given = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        made = [keyword.value for keyword in value.keywords if keyword.arg == "default_factory"]
        if made and isinstance(made[0], ast.Name) and made[0].id in ("list", "dict"):
            return [] if made[0].id == "list" else {}
        value = next(iter([*value.args[:1], *given]), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
