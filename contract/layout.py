"""What two engines must agree on before one may read the other's KV: the model and the shape of a block."""

import hashlib
from pathlib import Path

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 64


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one KV block: ``[num_layers, 2, num_kv_heads, block_size, head_dim]`` of ``dtype``, contiguous."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def differences(self, other: "KVLayout") -> list[str]:
        """What differs, as "name: ours is A, the peer's is B"; empty for equal layouts."""
        return [
            f"{name}: ours is {getattr(self, name)}, the peer's is {getattr(other, name)}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]

    def fingerprint(self) -> str:
        """A short hash of the layout; equal fingerprints mean that blocks can be copied byte by byte."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


def model_fingerprint(folder: Path, dtype: str) -> str:
    """Identify a checkpoint by its configuration and its weights (headers, sizes and samples), computed in ``dtype``.

    Two workers with equal fingerprints produce interchangeable KV. Raises FileNotFoundError without weights.
    """
    state = hashlib.blake2b(digest_size=16)
    state.update(dtype.encode())
    state.update((folder / "config.json").read_bytes())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors file")
    for file in files:
        state.update(file.name.encode())
        size = file.stat().st_size
        state.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            state.update(stream.read(min(header_bytes, size)))
            for sample in range(_NUM_SAMPLES):
                stream.seek(min(size, size * sample // _NUM_SAMPLES))
                state.update(stream.read(_SAMPLE_BYTES))
    return state.hexdigest()
