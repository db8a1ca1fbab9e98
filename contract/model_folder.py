"""Reads the small files of a model folder as untrusted input: every fault becomes one error, within resource limits.

A file may be a pipe that never ends, a folder, a device or as large as the disk; its JSON may be nested without end, and
a name in it may point out of the folder.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from contract.errors import SettingError

MAX_JSON_BYTES = 64 * 2**20
"""Size limit of a configuration or a weight map; ten times the largest published ones."""
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_DEPTH = 64
"""Nesting limit of objects and lists; configurations have 6 levels at most."""
MAX_ENTRIES = 10_000
MAX_TOKEN_ID = 2**31 - 1
LENGTH_WITHOUT_POSITIONS = 8192
"""The longest context, without a setting, of a model whose configuration gives none: one of recurrent layers alone."""
LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "context_length",
    "n_ctx",
)
"""The names under which published configurations give the longest context."""
_MAX_NAME = 255
_END_TOKENS = "eos_token_id"
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_entries(folder: Path) -> None:
    """Raise SettingError unless the folder contains regular files and folders only.

    Libraries open its files by name, and would wait for ever at a pipe.
    """
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= MAX_ENTRIES:
                    _fail(f"{folder} contains more than {MAX_ENTRIES} files")
                # A link whose target does not exist counts as a missing file.
                is_dangling = entry.is_symlink() and not Path(entry.path).exists()
                if not (entry.is_file() or entry.is_dir() or is_dangling):
                    _fail(f"{entry.path} is {_kind(entry.stat().st_mode)}; it must be a file")
    except OSError as error:
        _fail(f"{folder} cannot be read: {error.strerror or error}", error)


def read_bytes(file: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    """Return the content of a regular file, None if it does not exist.

    Raises SettingError for anything else, and for more than ``max_bytes``. Never waits for a writer.
    """
    try:
        # A pipe without a writer would block.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _fail(f"{file} cannot be opened: {error}", error)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            _fail(f"{file} is {_kind(found.st_mode)}; it must be a file")
        if found.st_size > max_bytes:
            _fail(f"{file} has {found.st_size} bytes; the limit is {max_bytes}")
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            # One byte more shows that the file grew, and a file that grows without end is not read to its end.
            content = stream.read(found.st_size + 1)
        if len(content) > found.st_size:
            _fail(f"{file} grew while it was read")
        return content
    except OSError as error:
        _fail(f"{file} cannot be read: {error.strerror or error}", error)
    finally:
        os.close(descriptor)


def read_text(file: Path, max_bytes: int = MAX_JSON_BYTES) -> str | None:
    """Return the text of a UTF-8 file, None if it does not exist. Raises SettingError, see ``read_bytes``."""
    content = read_bytes(file, max_bytes)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        _fail(f"{file} is not valid UTF-8: {error.reason} at byte {error.start}", error)


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON value of a file, None if it does not exist.

    Raises SettingError for invalid JSON, for an object with a duplicate name (readers differ in which one they use), for
    values nested deeper than MAX_DEPTH, and for text that is not Unicode.
    """
    text = read_text(file, max_bytes)
    if text is None:
        return None
    try:
        # Some editors begin a file with a byte order mark.
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unique)
    except _TwiceError as error:
        _fail(f"{file} has {str(error)!r:.80} twice in one object", error)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        _fail(f"{file} cannot be read: it is not valid JSON: {why}", error)
    if _depth_exceeds(value, MAX_DEPTH):
        _fail(f"{file} is nested deeper than {MAX_DEPTH} levels")
    # The file is UTF-8: only an escape can make half of a pair.
    if "\\ud" in text.lower() and (half := _half_pair(value)) is not None:
        _fail(f"{file} contains half of a surrogate pair, in {half!r:.80}")
    return value


def read_json_object(file: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """Return the object of a JSON file, None if it does not exist. Raises SettingError, see ``read_json``."""
    value = read_json(file, max_bytes)
    if value is not None and not isinstance(value, dict):
        _fail(f"{file} must contain a JSON object, not {type(value).__name__}")
    if value is None and file.exists():
        _fail(f"{file} must contain a JSON object, not null")
    return value


def token_ids(value: object, name: str, file: str) -> tuple[int, ...]:
    """Return the token ids of a field (an id, a list of ids, or null), each once. Raises SettingError for other values."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            _fail(
                f"{file} cannot be read: {name} is {value!r:.80};"
                f" it must be a token id within 0..{MAX_TOKEN_ID}, or a list of them"
            )
    return tuple(dict.fromkeys(ids))


def end_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the model's own end tokens: those of generation_config.json, else of config.json. Raises SettingError."""
    for fields, file in ((generation, "generation_config.json"), (config, "config.json")):
        if fields.get(_END_TOKENS) is not None:
            return token_ids(fields[_END_TOKENS], _END_TOKENS, file)
    return ()


def file_within(folder: Path, name: object, named_in: str) -> Path:
    """Return the path of a file that another file of the folder names. Raises SettingError for one outside the folder.

    A link may point into the ``blobs`` of the same repository in huggingface_hub's cache, which consists of links.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or "\0" in name or "\\" in name:
        _fail(f"{named_in} names {name!r:.80} as a file")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        _fail(f"{named_in} names {name!r:.80}, which is outside the folder")
    try:
        real = (folder / name).resolve()
        home = folder.resolve()
    except (OSError, RuntimeError) as error:
        _fail(f"{named_in} names {name!r:.80}, which cannot be resolved: {error}", error)
    if not real.is_relative_to(home) and not real.is_relative_to(home.parent.parent / "blobs"):
        _fail(f"{named_in} names {name!r:.80}, which is a link out of the folder, to {real}")
    return folder / name


class _TwiceError(ValueError):
    """An object has a duplicate name."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _TwiceError(name)
            seen.add(name)
    return found


def _depth_exceeds(value: Any, most: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most + 1):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _half_pair(value: Any) -> str | None:
    """Return a text in the value that cannot be encoded."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str) and _SURROGATE.search(one):
            return one
    return None


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def _fail(what: str, cause: BaseException | None = None) -> NoReturn:
    raise SettingError(f"model: {what}", param="model") from cause
