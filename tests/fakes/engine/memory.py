"""The KV memory of a fake rank: each slot holds a number that depends on all tokens up to its position."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contract.layout import KVLayout
from engine.connector import Computed

if TYPE_CHECKING:
    from tests.fakes.engine.sequences import FakeStates

MODULUS = 2**61 - 1


def prefix_codes(token_ids: Sequence[int]) -> list[int]:
    """Return the content of each position's KV slot: a number that depends on all tokens up to there."""
    codes = []
    code = 1
    for token in token_ids:
        code = (code * 1_000_003 + token + 7) % MODULUS
        codes.append(code)
    return codes


class FakeMemory:
    """KV without bytes: ``slots[block][offset]`` is the code that was written there, None for garbage."""

    pool_view: memoryview | None = None
    device_pool = None
    states: "FakeStates | None" = None
    """The slots beside this memory, in a model with recurrent layers."""
    start = 0
    others: "Sequence[FakeMemory]" = ()
    """The memories of the further groups of layers."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.layout = KVLayout(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32"
        )
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]

    def write(self, block_ids: Sequence[int], codes: Sequence[int], start: int, end: int) -> None:
        """Fill positions ``start:end`` of a sequence whose blocks are ``block_ids``."""
        size = self.layout.block_size
        for position in range(start, end):
            self.slots[block_ids[position // size]][position % size] = codes[position]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the content of blocks."""
        for source, target in pairs:
            self.slots[target] = list(self.slots[source])

    def mark_computed(self) -> Computed:
        """Return what does not wait: there is nothing to wait for."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""

    def check(self, block_ids: Sequence[int], codes: Sequence[int], end: int, start: int = 0) -> None:
        """Assert that positions ``start:end`` hold the codes of these tokens."""
        size = self.layout.block_size
        for position in range(start, end):
            held = self.slots[block_ids[position // size]][position % size]
            assert held == codes[position], (
                f"position {position}: block {block_ids[position // size]} holds other KV"
            )

    def scribble(self, block_ids: Sequence[int]) -> None:
        """Fill these blocks with garbage, as a late write does."""
        for block in block_ids:
            self.slots[block] = [None] * self.layout.block_size

    @property
    def regions(self) -> "tuple[FakeMemory, ...]":
        """This one, and those of the further groups of layers."""
        return self, *self.others

    @property
    def memfd(self) -> int | None:
        """Always None: there is no file."""
        return None

    def read_view(self, block_id: int) -> memoryview:
        """Return zeros: there are no bytes."""
        return memoryview(bytes(self.layout.block_bytes))

    def write_view(self, block_id: int) -> memoryview:
        """Return a buffer whose content is discarded."""
        return memoryview(bytearray(self.layout.block_bytes))

    def commit(self, block_ids: list[int]) -> None:
        """Do nothing: there is no device."""
