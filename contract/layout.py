"""The model and the block layout, on which two engines must agree before one may read the other's KV."""

import hashlib
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from contract.decoding import Positive
from contract.errors import SettingError
from contract.model_folder import read_bytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONVERTED_DTYPES = frozenset({"float32", "bfloat16"})
"""Types with equal ranges: a value of one becomes a value of the other by rounding. float16 would overflow."""
MAX_BLOCK_SIZE_RATIO = 16
KEY_VALUE = ("key", "value")
"""The parts of a layer that caches a key and a value of each token and KV head."""
LATENT = ("latent",)
"""The part of a layer with multi-head latent attention: one row of each token, for all heads (DeepSeek-V2, 2024)."""
JOINED = ("key and value",)
"""The part of a layer whose keys and values differ in width: one row of each token and KV head, the value behind the key."""
STATES = ("states",)
"""The part of a piece of a slot (``contract.state_layout``), which stands for a block in transfers."""
_MAX_PARTS = 8
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 64
# The limit of the safetensors library.
_MAX_HEADER_BYTES = 100_000_000


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shape of one KV block: ``[num_layers, parts, num_kv_heads, block_size, head_dim]`` of ``dtype``, contiguous.

    parts: the names of what a layer caches of each token and KV head, of equal shapes. Key and value are left out wherever
    a layout is encoded, so that its messages and fingerprint are those of versions without this field.
    """

    num_layers: Annotated[int, msgspec.Meta(ge=0)]
    num_kv_heads: Positive
    head_dim: Positive
    block_size: Positive
    dtype: str
    parts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=_MAX_PARTS)] = KEY_VALUE

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes of one block."""
        return self.num_layers, len(self.parts), self.num_kv_heads, self.block_size, self.head_dim

    @property
    def block_bytes(self) -> int:
        """The size of one block over all layers and parts."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def differences(self, other: "KVLayout") -> list[str]:
        """Return the differences that no conversion bridges, as "name: ours is A, the peer's is B (reason)".

        If there are none, KV can be handed over. Symmetric. Converted are float32 and bfloat16 into each other, and a block
        size into a multiple of it.
        """
        return [
            f"{name}: ours is {_told(getattr(self, name))}, the peer's is {_told(getattr(other, name))}{why_not}"
            for name in self.__struct_fields__
            if (why_not := self._why_not(name, other)) is not None
        ]

    def _why_not(self, name: str, other: "KVLayout") -> str | None:
        """Return why this difference is not supported, in brackets if that is not obvious; None if equal or convertible."""
        ours = getattr(self, name)
        theirs = getattr(other, name)
        if ours == theirs:
            return None
        if name == "dtype":
            is_bridged = {ours, theirs} <= CONVERTED_DTYPES
            return None if is_bridged else " (only float32 and bfloat16 are converted into each other)"
        if name == "block_size":
            small, large = sorted((ours, theirs))
            if small < 1 or large % small:
                return " (neither is a multiple of the other)"
            is_bridged = large // small <= MAX_BLOCK_SIZE_RATIO
            return None if is_bridged else f" (more than {MAX_BLOCK_SIZE_RATIO} times as many)"
        return ""

    def fingerprint(self) -> str:
        """Return a short hash of the layout; with equal fingerprints blocks can be copied byte by byte."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


def _told(value: object) -> str:
    return " and ".join(value) if isinstance(value, tuple) else str(value)


def heads_of_rank(num_kv_heads: int, num_ranks: int, rank: int) -> range:
    """Return the KV heads that a rank holds: equally many on each, and together all of them.

    If the ranks do not divide the heads, neighbours hold the same ones: no rank has a head that the model lacks.
    """
    first = rank * num_kv_heads // num_ranks
    return range(first, first + -(-num_kv_heads // num_ranks))


class Side(msgspec.Struct, frozen=True):
    """The KV of one worker: ``num_ranks`` ranks of equal ``layout``, each with its ``heads``.

    num_kv_heads: of the model; 0 becomes that of ranks of which no two hold the same head. Raises ValueError for a number
    that these ranks do not hold.
    """

    layout: KVLayout
    num_ranks: Annotated[int, msgspec.Meta(ge=1)] = 1
    num_kv_heads: int = 0

    def __post_init__(self) -> None:
        """Complete the number of KV heads."""
        if not self.num_kv_heads:
            msgspec.structs.force_setattr(self, "num_kv_heads", self.layout.num_kv_heads * self.num_ranks)
        if len(self.heads(0)) != self.layout.num_kv_heads:
            raise ValueError(
                f"{self.num_ranks} ranks of {self.layout.num_kv_heads} KV heads each do not hold {self.num_kv_heads} heads"
            )

    @property
    def whole(self) -> KVLayout:
        """The shape of a block over all ranks."""
        return msgspec.structs.replace(self.layout, num_kv_heads=self.num_kv_heads)

    def differences(self, other: "Side") -> list[str]:
        """Return ``KVLayout.differences`` of the whole blocks of each group; the numbers of ranks may differ."""
        if self.group_names != other.group_names:
            return [f"cache groups: ours are {_listed(self)}, the peer's are {_listed(other)}"]
        found = [
            ours.whole.differences(theirs.whole)
            for ours, theirs in zip(self.groups, other.groups, strict=True)
        ]
        return list(dict.fromkeys(difference for each in found for difference in each))

    @property
    def has_copies(self) -> bool:
        """True if some KV head is held by several ranks."""
        return self.num_kv_heads < self.layout.num_kv_heads * self.num_ranks

    @property
    def groups(self) -> "tuple[Side, ...]":
        """This side for each group of layers (``contract.cache_layout``): itself if each layer keeps all tokens."""
        return (self,)

    @property
    def group_names(self) -> tuple[str, ...]:
        """The layers and the reach of each group; empty if each layer keeps all tokens."""
        return ()

    @property
    def state_group(self) -> int | None:
        """The number of the group that stands for the states of recurrent layers; None without any."""
        return None

    def places_to_send(self, num_tokens: int) -> tuple[range, ...]:
        """Return the blocks of each group that are handed over of a prompt, by their places in it."""
        return (range(self.num_blocks(num_tokens)),)

    def heads(self, rank: int) -> range:
        """Return the KV heads of this rank."""
        return heads_of_rank(self.num_kv_heads, self.num_ranks, rank)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of a prompt."""
        return -(-num_tokens // self.layout.block_size)


def _listed(side: Side) -> str:
    return "; ".join(side.group_names) or "all tokens in all layers"


def resolve_kv_dtype(setting: str, dtype: str) -> str:
    """Return the dtype of the KV of a model that computes in ``dtype``, which "auto" means too.

    Raises SettingError for a pair of which one cannot hold the other's values: they would be infinite.
    """
    if setting in ("auto", dtype):
        return dtype
    if not {setting, dtype} <= CONVERTED_DTYPES:
        raise SettingError(
            f"kv_cache_dtype is {setting!r}, and the model computes {dtype}: only float32 and bfloat16 are converted into "
            f"each other; set it to auto or {dtype}",
            param="kv_cache_dtype",
        )
    return setting


def model_fingerprint(folder: Path, dtype: str) -> str:
    """Identify a checkpoint by its configuration and its weights (headers, sizes and samples), computed in ``dtype``.

    dtype: that of the computation, with what else makes its KV differ (FP8 products, a dtype of the KV of its own).

    The form is "<weights>@<dtype>". The configuration includes the pooling of sentence-transformers. Workers with equal
    fingerprints produce interchangeable KV; if only the dtypes differ, a worker can continue with the other's KV after
    rounding, but would have computed other values itself. Raises FileNotFoundError without weights.
    """
    state = hashlib.blake2b(digest_size=16)
    state.update(read_bytes(folder / "config.json") or b"")
    for file in sorted([*folder.glob("modules.json"), *folder.glob("[0-9]_*/config.json")]):
        content = read_bytes(file) or b""
        state.update(f"{file.relative_to(folder)}:{len(content)}:".encode() + content)
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not files:
        raise FileNotFoundError(f"{folder} contains no *.safetensors file")
    for file in files:
        state.update(file.name.encode())
        size = file.stat().st_size
        state.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            # A damaged file can claim any length.
            state.update(stream.read(min(header_bytes, size, _MAX_HEADER_BYTES)))
            # Reading tens of gigabytes would delay every start; fine-tuned weights differ nearly everywhere.
            for sample in range(_NUM_SAMPLES):
                stream.seek(min(size, size * sample // _NUM_SAMPLES))
                state.update(stream.read(_SAMPLE_BYTES))
    return f"{state.hexdigest()}@{dtype}"


def weights_of(fingerprint: str) -> str:
    """Return the part of a model fingerprint that does not depend on the dtype."""
    return fingerprint.partition("@")[0]


def received_fingerprint(ours: str, theirs: str) -> str:
    """Return the fingerprint for hashes of KV that an engine ``ours`` received from ``theirs`` with another dtype (law 7).

    Neither engine would have computed this KV itself, so received KV is never found in place of computed KV, or vice versa.
    """
    return f"{ours} from {theirs}"
