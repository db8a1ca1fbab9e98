"""Read a Hugging Face folder: configuration, end tokens, and safetensors weights by memory map.

Needs no torch until a tensor is read: names, shapes and dtypes stand in the files' headers.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from safetensors import SafetensorError, safe_open

from contract.decoding import decode_outside, json_decoder
from contract.errors import SettingError
from contract.model_folder import (
    MAX_TOKENIZER_BYTES,
    check_entries,
    end_token_ids,
    file_within,
    read_bytes,
    read_json_object,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine.models.sharding import Part

PLAIN_DTYPES = frozenset({"F64", "F32", "BF16", "F16"})
"""Numbers that need no scale, as safetensors names them."""
DTYPE_NAMES = ("float32", "bfloat16", "float16")
STORED_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The names that torch has for dtypes in which a model can be computed, by those of safetensors."""
HEAD_NAME = "lm_head.weight"
_DECODER = "model."
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
_NAMES_SHOWN = 5
_NOTES_OF_CONFIG = frozenset({"transformers_version", "_name_or_path"})
"""Fields of config.json about the program that has written it."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHOWN_CHARACTERS = 80
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
"""A file begins with the length of its header."""
_INTEGERS = {"I32": "<i", "I64": "<q"}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json. Raises SettingError if it is missing or not a JSON object."""
    if not folder.is_dir():
        raise bad_model(f"{folder} is not a folder")
    check_entries(folder)
    config = read_json_object(folder / "config.json")
    if config is None:
        raise bad_model(f"{folder} has no config.json")
    return config


def read_eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the model's end tokens from generation_config.json, else from config.json; empty if neither has any."""
    return end_token_ids(config, read_json_object(folder / "generation_config.json") or {})


class Weights(Protocol):
    """The tensors that a model loads, by name: those of the files, or dequantised ones in their place.

    is_bare: see ``Checkpoint``.
    """

    is_bare: bool

    def names(self) -> Set[str]:
        """Return the names of all tensors."""

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of what ``tensor`` returns, as safetensors names it, without reading it."""

    def shape(self, name: str) -> list[int]:
        """Return the tensor's shape without reading it."""

    def tensor(self, name: str) -> "Tensor":
        """Return the tensor on the host."""

    def part(self, name: str, part: "Part") -> "Tensor":
        """Return a part of the tensor on the host."""

    def first_dtype(self) -> str:
        """Return the dtype of the tensor whose name sorts first among those that are not quantised, as torch names it."""

    def is_spare(self, name: str) -> bool:
        """Return whether a model that has no such tensor can be served without it."""


def resolve_dtype(setting: str, config: Mapping[str, Any], checkpoint: Weights) -> str:
    """Return the dtype to compute in; "auto" is what config.json names, else that of the checkpoint's first tensor."""
    if setting != "auto":
        return setting
    named = config.get("dtype") or config.get("torch_dtype") or checkpoint.first_dtype()
    name = str(named).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise bad_model(f"the checkpoint's dtype is {name}; set dtype to one of {', '.join(DTYPE_NAMES)}")
    return name


class _Stored(msgspec.Struct, frozen=True, gc=False):
    """A tensor in the header of a file; the entry of the file's notes has neither of these."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


_HEADER: msgspec.json.Decoder[dict[str, _Stored]] = json_decoder(dict[str, _Stored])


class Checkpoint:
    """The weights of one folder, by name; a tensor is read from its memory map on access.

    is_bare: the decoder was saved without the model around it (transformers' ``AutoModel``), as embedding models are. The
    file calls its tensors "norm.weight", this class "model.norm.weight".
    """

    def __init__(self, folder: Path, framework: str = "pt") -> None:
        """Open a folder. framework: of the tensors, as safetensors names it; with "numpy" nothing imports torch."""
        self._framework = framework
        stored = _files_by_name(folder, framework)
        self.is_bare = not any(name.startswith(_DECODER) for name in stored)
        self._file_of = {f"{_DECODER}{name}": stored[name] for name in stored} if self.is_bare else stored
        self._names = frozenset(self._file_of)
        self._open: dict[Path, Any] = {}

    def names(self) -> Set[str]:
        """Return the names of all tensors."""
        return self._names

    def tensor(self, name: str) -> "Tensor":
        """Return the tensor on the host, backed by the file's memory map. Raises KeyError for an unknown name."""
        tensor: Tensor = self._file(name).get_tensor(self._stored(name))
        return tensor

    def shape(self, name: str) -> list[int]:
        """Return the tensor's shape without reading it. Raises KeyError for an unknown name."""
        return list(self._headers[name].shape)

    def stored_dtype(self, name: str) -> str:
        """Return the tensor's dtype, as safetensors names it, without reading it. Raises KeyError for an unknown name."""
        return self._headers[name].dtype

    def part(self, name: str, part: "Part") -> "Tensor":
        """Return a part of the tensor on the host; only the bytes of that part are read."""
        stored = self._file(name).get_slice(self._stored(name))
        return part.assemble(lambda own: stored[(slice(None),) * part.dim + (own,)])

    def first_dtype(self) -> str:
        """Return the dtype of the tensor whose name sorts first, as torch names it."""
        return self.named_dtype(min(self._file_of))

    def named_dtype(self, name: str) -> str:
        """Return a tensor's dtype, as torch names it where a model can be computed in it."""
        stored = self.stored_dtype(name)
        return STORED_NAMES.get(stored, stored)

    def is_spare(self, name: str) -> bool:
        """Return False: each tensor of a plain checkpoint belongs to its model."""
        return False

    def is_zero(self, name: str) -> bool:
        """Return whether a tensor, which is read for it, has nothing but zeros."""
        begin, end = self._headers[name].data_offsets
        with self._file_of[name].open(
            "rb"
        ) as stream:  # numpy has no bfloat16, and to import torch takes seconds
            stream.seek(_LENGTH_BYTES + int.from_bytes(stream.read(_LENGTH_BYTES), "little") + begin)
            content = stream.read(end - begin)
        return content.count(0) == len(content)

    def integers(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Return the numbers of small tensors of I32 and I64, by name; those of other dtypes are left out.

        They are read from the files: a memory map would read 128 KB around each of them.
        """
        in_files: dict[Path, list[str]] = {}
        for name in names:
            if self.stored_dtype(name) in _INTEGERS:
                in_files.setdefault(self._file_of[name], []).append(name)
        found = {}
        for file, in_file in in_files.items():
            with file.open("rb") as stream:
                number = stream.fileno()
                start = _LENGTH_BYTES + int.from_bytes(stream.read(_LENGTH_BYTES), "little")
                for name in in_file:
                    stored = self._headers[name]
                    begin, end = stored.data_offsets
                    content = os.pread(number, end - begin, start + begin)
                    found[name] = [each for (each,) in struct.iter_unpack(_INTEGERS[stored.dtype], content)]
        return found

    @cached_property
    def _headers(self) -> Mapping[str, _Stored]:
        """Read what each tensor is from the files' headers at once: safetensors searches all of a header for each tensor."""
        in_files = {}
        for file in sorted(set(self._file_of.values())):
            self._opened(file)  # its checks bound the size of the header
            in_files[file] = _read_header(file)
        found = {name: in_files[file].get(self._stored(name)) for name, file in self._file_of.items()}
        if missing := [name for name, stored in found.items() if stored is None]:
            raise bad_model(
                f"{self._file_of[missing[0]]} has no tensor {missing[0]}, which {_INDEX} places there"
            )
        return {name: stored for name, stored in found.items() if stored is not None}

    def _stored(self, name: str) -> str:
        return name.removeprefix(_DECODER) if self.is_bare else name

    def _file(self, name: str) -> Any:
        return self._opened(self._file_of[name])

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = _open(file, self._framework)
        return self._open[file]


def describe_model(folder: Path) -> dict[str, Any]:
    """Return what a loaded model depends on beside its numbers, by name.

    These are config.json, the end tokens, the tokenizer, which routers keep, and the shapes and types of tensors.
    Raises SettingError for a folder that cannot be read.
    """
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    facts: dict[str, Any] = {
        f"{name} of config.json": value for name, value in config.items() if name not in _NOTES_OF_CONFIG
    }
    facts["the end tokens"] = read_eos_token_ids(folder, config)
    for name in _TOKENIZER_FILES:
        content = read_bytes(folder / name, MAX_TOKENIZER_BYTES)
        facts[f"the digest of {name}"] = content and hashlib.blake2b(content, digest_size=8).hexdigest()
    for name in sorted(checkpoint.names()):
        facts[f"tensor {name}"] = (checkpoint.shape(name), checkpoint.stored_dtype(name))
    return facts


def check_same_model(loaded: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise SettingError that names the first fact of ``describe_model`` in which the folder differs from what is loaded."""
    for name in [*loaded, *(found.keys() - loaded.keys())]:
        if loaded.get(name) != found.get(name):
            raise bad_model(
                f"{name} was {loaded.get(name)!r:.80} when the model was loaded and is {found.get(name)!r:.80}; weights are "
                "reloaded into the same model only: start the engine again for another one"
            )


def check_tensors(
    expected: Mapping[str, Sequence[int]],
    checkpoint: Weights,
    have_scales: Set[str] = frozenset(),
    others: Set[str] = frozenset(),
) -> None:
    """Raise SettingError that names missing, unexpected and misshapen tensors, and numbers without their scale.

    expected: the shape of each tensor of the model. have_scales: names of those whose numbers have scales.
    others: names that the checkpoint has beside the expected ones.
    """
    found = {name for name in checkpoint.names() if not name.endswith(_IGNORED_SUFFIX)}
    _refuse("misses", set(expected) - found)
    unexpected = found - set(expected) - others
    _refuse("has unexpected", {name for name in unexpected if not checkpoint.is_spare(name)})
    for name, shape in expected.items():
        if (found_shape := checkpoint.shape(name)) != list(shape):
            raise bad_model(f"tensor {name} is {found_shape}; config.json requires {list(shape)}")
        if name not in have_scales and (stored := checkpoint.stored_dtype(name)) not in PLAIN_DTYPES:
            raise bad_model(f"tensor {name} is stored as {stored}, and config.json describes no such numbers")


def _refuse(what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
        rest = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        raise bad_model(f"the checkpoint {what} {len(names)} tensors: {shown}{rest}")


def _files_by_name(folder: Path, framework: str) -> dict[str, Path]:
    """Map tensor names to files, by the index of a sharded checkpoint or from the single file."""
    index = read_json_object(folder / _INDEX)
    if index is None:
        single = folder / "model.safetensors"
        if not single.is_file():
            raise bad_model(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        return dict.fromkeys(_open(single, framework).keys(), single)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_model(f"{_INDEX} has no weight_map")
    # A name that is no string, perhaps no key either, is refused by ``file_within``, which shows it.
    names = {
        name if isinstance(name, str) else repr(name)[:_SHOWN_CHARACTERS] for name in weight_map.values()
    }
    shards = {name: file_within(folder, name, _INDEX) for name in names}
    if absent := sorted(file.name for file in shards.values() if not file.is_file()):
        raise bad_model(f"{folder} lacks the shard {absent[0]} that {_INDEX} names")
    return {name: shards[file] for name, file in weight_map.items()}


def _open(file: Path, framework: str) -> Any:
    try:
        return safe_open(str(file), framework=framework)
    except (SafetensorError, OSError) as error:
        raise bad_model(f"{file} cannot be read as safetensors: {error}") from error


def _read_header(file: Path) -> Mapping[str, _Stored]:
    """Return the tensors of a file by name."""
    with file.open("rb") as stream:
        text = stream.read(int.from_bytes(stream.read(_LENGTH_BYTES), "little"))
    return decode_outside(
        _HEADER.decode, text, lambda told: bad_model(f"{file} cannot be read as safetensors: {told}")
    )


def bad_model(what: str) -> SettingError:
    """Make the error for a folder that cannot be served."""
    return SettingError(f"model: {what}", param="model")
