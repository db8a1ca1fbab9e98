"""Refuse Python files over 400 lines and functions over 60 lines; generated code is excepted."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SKIPPED_FOLDERS = ("build", "dist")
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def oversized(path: Path) -> Iterator[str]:
    """One line for the file and for each function of it that is too long; a decorator does not count."""
    source = path.read_text()
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{path}: {num_lines} lines; a file may have {MAX_FILE_LINES}: cut it by concern"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; a function may have {MAX_FUNCTION_LINES}"


def own_files(root: Path) -> list[Path]:
    """Every hand-written Python file below ``root``; hidden folders and builds are not looked into."""
    return sorted(
        file
        for folder in root.iterdir()
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in SKIPPED_FOLDERS
        for file in folder.rglob("*.py")
        if not file.name.endswith(GENERATED)
    )


def main(root: Path) -> int:
    """Check every file below ``root``; the exit code says whether all fit."""
    problems = [line for file in own_files(root) for line in oversized(file)]
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path()))
