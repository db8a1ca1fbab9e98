"""A worker's computing half without torch: KV of real bytes that identify their tokens."""

from collections.abc import Sequence

from contract.layout import KVLayout
from engine.settings import EngineSettings
from tests.fakes.engine.fakes import FakeExecutor, FakeRunner
from tests.fakes.engine.memory import FakeMemory
from tests.kv_transfer.fakes import ByteMemory

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=128, block_size=4, dtype="float32")
_SLOT_BYTES = LAYOUT.block_bytes // LAYOUT.block_size
_CODE_BYTES = 8


class CodedMemory(FakeMemory):
    """A ``FakeMemory`` with bytes that transports can move: each slot repeats the code of all tokens up to its position.

    ``FakeRunner`` checks all KV before it uses it, so KV of another prompt, position or time ends the engine.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(1, LAYOUT.block_size)
        self.layout, self.num_blocks = LAYOUT, num_blocks
        self._bytes = ByteMemory(LAYOUT, num_blocks)

    @property
    def memfd(self) -> int | None:
        """The file of the pool."""
        return self._bytes.memfd

    def write(self, block_ids: Sequence[int], codes: Sequence[int], start: int, end: int) -> None:
        """Fill positions ``start:end`` with their codes."""
        for position in range(start, end):
            self._slot(block_ids, position)[:] = _content(codes[position])

    def check(self, block_ids: Sequence[int], codes: Sequence[int], end: int, start: int = 0) -> None:
        """Assert that positions ``start:end`` hold their codes, to the last byte."""
        for position in range(start, end):
            block_id = block_ids[position // LAYOUT.block_size]
            held = self._slot(block_ids, position)
            assert held == _content(codes[position]), f"position {position}: block {block_id} holds other KV"

    def read_view(self, block_id: int) -> memoryview:
        """Return the block itself."""
        return self._bytes.read_view(block_id)

    def write_view(self, block_id: int) -> memoryview:
        """Return the block itself."""
        return self._bytes.write_view(block_id)

    def commit(self, block_ids: list[int]) -> None:
        """Do nothing."""

    def _slot(self, block_ids: Sequence[int], position: int) -> memoryview:
        start = position % LAYOUT.block_size * _SLOT_BYTES
        return self._bytes.write_view(block_ids[position // LAYOUT.block_size])[start : start + _SLOT_BYTES]


class CodedExecutor(FakeExecutor):
    """``FakeExecutor`` on a ``CodedMemory``."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.memory = CodedMemory(self.memory.num_blocks)
        self.runner = FakeRunner(self.memory)


def start_coded_executor(settings: EngineSettings) -> tuple[FakeExecutor, int]:
    """Start an executor. An ``ExecutorStart``: ``kv_cache_bytes`` counts blocks. Picklable."""
    executor = CodedExecutor(settings)
    return executor, executor.memory.num_blocks


def _content(code: int) -> bytes:
    return code.to_bytes(_CODE_BYTES, "little") * (_SLOT_BYTES // _CODE_BYTES)
