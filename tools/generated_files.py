"""The end of every generator: write what it has made, or check that the committed files are in sync with their source."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_or_check(
    texts: Mapping[Path, str], arguments: list[str], complaint: str, present: Iterable[Path] = ()
) -> int:
    """Write the files, or with ``--check`` only compare, and return the exit status.

    complaint: printed if they are out of sync. present: files that are there; one without a text is out of sync too.
    """
    if arguments != ["--check"]:
        for path, text in texts.items():
            path.write_text(text)
        return 0
    is_complete = texts.keys() >= set(present)
    if is_complete and all(path.is_file() and path.read_text() == text for path, text in texts.items()):
        return 0
    print(complaint, file=sys.stderr)
    return 1
