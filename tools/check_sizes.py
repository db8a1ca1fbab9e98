"""Refuse Python files, functions and classes that are too large to read; generated code is not looked at.

A class may have 200 lines, 10 attributes that ``__init__`` sets and 8 private methods. Records (dataclasses and msgspec
structs) declare their fields one below the other, so only their lines and methods count. Tests are held to the bounds of
files and functions only.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES = 200
MAX_FIELDS = 10
MAX_PRIVATE_METHODS = 8
MAX_EXCEPTIONS = 12
EXCEPTIONS_FILE = Path(__file__).parent / "size_exceptions.toml"
SKIPPED_FOLDERS = ("build", "dist")
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def oversized(path: Path, exceptions: Mapping[str, str], *, is_test: bool = False) -> Iterator[str]:
    """Yield one line for the file and for each part of it that is too large; a decorator does not count.

    exceptions: ``path:class`` with the reason why this class may be larger.
    """
    source = path.read_text()
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{path}: {num_lines} lines; a file may have {MAX_FILE_LINES}: cut it by concern"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (length := _num_lines(node)) > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; a function may have {MAX_FUNCTION_LINES}"
        elif is_test:
            continue
        elif isinstance(node, ast.ClassDef):
            is_excepted = f"{path}:{node.name}" in exceptions
            problems = class_problems(node)
            if problems and not is_excepted:
                yield f"{path}:{node.lineno}: {node.name} has {', '.join(problems)}: find its second concept"
            if is_excepted and not problems:
                yield f"{path}:{node.lineno}: {node.name} fits now; remove it from {EXCEPTIONS_FILE.name}"
        elif isinstance(node, ast.Assign) and is_parallel(node):
            yield f"{path}:{node.lineno}: assign unrelated values in statements of their own"


def class_problems(node: ast.ClassDef) -> list[str]:
    """Return what is too large in a class, empty if it fits."""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    num_private = sum(method.name.startswith("_") and not method.name.startswith("__") for method in methods)
    num_fields = len(
        {name for method in methods if method.name == "__init__" for name in _fields_set(method)}
    )
    counted = (
        (_num_lines(node), MAX_CLASS_LINES, "lines"),
        (num_fields, MAX_FIELDS, "fields"),
        (num_private, MAX_PRIVATE_METHODS, "private methods"),
    )
    return [f"{number} {what} of {bound}" for number, bound, what in counted if number > bound]


def is_parallel(node: ast.Assign) -> bool:
    """Return whether ``node`` is ``a, b = x, y`` and no exchange: no target stands on the right."""
    target = node.targets[0]
    value = node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    targets = {ast.unparse(element) for element in target.elts}
    return not any(ast.unparse(part) in targets for part in ast.walk(value) if isinstance(part, ast.expr))


def own_files(root: Path) -> list[Path]:
    """Return every hand-written Python file below ``root``; hidden folders and builds are left out."""
    return sorted(
        file
        for folder in root.iterdir()
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in SKIPPED_FOLDERS
        for file in folder.rglob("*.py")
        if not file.name.endswith(GENERATED)
    )


def read_exceptions() -> dict[str, str]:
    """Return the classes that may be larger, ``path:class`` → reason."""
    return dict(tomllib.loads(EXCEPTIONS_FILE.read_text())["classes"])


def main(root: Path, exceptions: Mapping[str, str]) -> int:
    """Check every file below ``root``; return the exit code."""
    problems = [
        line
        for file in own_files(root)
        for line in oversized(file, exceptions, is_test=file.relative_to(root).parts[0] == "tests")
    ]
    problems += [
        f"{EXCEPTIONS_FILE.name}: {name} is in no such file"
        for name in exceptions
        if not (root / name.split(":")[0]).is_file()
    ]
    if len(exceptions) > MAX_EXCEPTIONS:
        problems.append(
            f"{EXCEPTIONS_FILE.name}: {len(exceptions)} classes; at most {MAX_EXCEPTIONS} may be larger"
        )
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _fields_set(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            yield node.attr


if __name__ == "__main__":
    sys.exit(main(Path(), read_exceptions()))
