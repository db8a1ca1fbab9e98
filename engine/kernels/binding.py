"""The Python binding of this folder's C code: the structs of ``kernels.h`` and its functions.

``python -m engine.kernels.binding FILE`` builds the library for an image without a compiler.
"""

import ctypes
import logging
import platform
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from native.compiling import CLibrary, NotCompiledError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

logger = logging.getLogger(__name__)
PANEL = 32
"""Outputs that are packed together."""
NUM_CODES = 16
"""Upper bytes that compressed weights have codes for."""
LIBRARY = CLibrary(
    "kernels",
    Path(__file__).parent,
    (
        *("-O3", "-std=gnu11", "-pthread"),
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma"),
        "-Wl,-Bsymbolic",  # names of the process, zlib's among them, are not taken for the library's own
    ),
)
_size = ctypes.c_size_t
_pointer = ctypes.c_void_p
Stored = ctypes.CFUNCTYPE(None, _size)
DRAW = [
    ("scores", "u8"),
    ("seed", "u8", 2),
    ("position", "u8"),
    *((name, "f8") for name in ("temperature", "min_p", "top_p")),
    ("top_k", "u8"),
]
"""``Draw``, for an array of NumPy's."""


class CLinear(ctypes.Structure):
    """``Linear``."""

    _fields_: ClassVar = [
        *((name, _pointer) for name in ("weight", "uppers", "starts", "others", "bias")),
        *((name, _size) for name in ("inputs", "outputs")),
    ]


class CLayer(ctypes.Structure):
    """``Layer``."""

    _fields_: ClassVar = [
        *((name, _pointer) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, CLinear) for name in ("qkv", "output", "gate_up", "down")),
        ("window", _size),
    ]


class CModel(ctypes.Structure):
    """``Model``."""

    _fields_: ClassVar = [
        *(
            (name, _size)
            for name in ("hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "num_layers")
        ),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layers", ctypes.POINTER(CLayer)),
        *((name, _pointer) for name in ("final_norm", "embedding", "cosines", "sines")),
    ]


class CStep(ctypes.Structure):
    """``Step``."""

    _fields_: ClassVar = [
        *((name, _size) for name in ("num_tokens", "num_requests", "block_size", "table_stride")),
        *(
            (name, _pointer)
            for name in (
                *("input_ids", "positions", "query_start", "seq_lens", "num_wanted"),
                *("block_table", "slots"),
            )
        ),
        ("caches", ctypes.POINTER(_pointer)),
        ("block_stride", _size),
        *((name, _pointer) for name in ("states", "normed", "qkv", "mixed", "gated", "scratch")),
        ("model", ctypes.POINTER(CModel)),
        ("stored", Stored),
        ("may_be_interrupted", ctypes.c_int),
    ]


class Kernels:
    """The loaded library. Every call releases the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.kvbaton_pool.restype = _pointer
        library.kvbaton_scratch_bytes.restype = _size
        library.kvbaton_end_pool.argtypes = (_pointer,)
        library.kvbaton_pack.argtypes = (_pointer, _pointer, _pointer, *[_size] * 5)
        library.kvbaton_compress.argtypes = (_pointer, _pointer, ctypes.POINTER(CLinear))
        library.kvbaton_compress.restype = _size
        library.kvbaton_list_others.argtypes = (_pointer, _pointer, ctypes.POINTER(CLinear))
        library.kvbaton_linear.argtypes = (
            _pointer,
            ctypes.POINTER(CLinear),
            _pointer,
            _size,
            _pointer,
            _pointer,
        )
        library.kvbaton_draw.argtypes = (_pointer, _pointer, _size, _size, _pointer, _pointer)
        library.kvbaton_draw_scratch.argtypes = (_size,)
        library.kvbaton_draw_scratch.restype = _size
        library.kvbaton_launch.argtypes = (_pointer, ctypes.POINTER(CStep))
        library.kvbaton_wait.argtypes = (_pointer,)
        library.kvbaton_interrupt.argtypes = (_pointer,)

    def start_threads(self, num_threads: int, cores: Sequence[int] = ()) -> int:
        """Start a pool of threads, the caller among them. cores: pins each of the others. Raises MemoryError."""
        own = (ctypes.c_int * num_threads)(*cores, *[-1] * (num_threads - len(cores)))
        pool: int | None = self._library.kvbaton_pool(_size(num_threads), own)
        if pool is None:
            raise MemoryError(f"the system has no room for {num_threads} threads")
        return pool

    def end_threads(self, pool: int) -> None:
        """End the pool's threads after running work; the pool may not be used any more."""
        self._library.kvbaton_end_pool(pool)

    def pack(
        self,
        pool: int,
        weight: "Tensor",
        packed: "Tensor",
        first: int = 0,
        panel_outputs: int = PANEL,
        panel_offset: int = 0,
    ) -> None:
        """Write ``weight [outputs, inputs]`` into panels: see ``kvbaton_pack``."""
        weight = weight.contiguous()
        self._library.kvbaton_pack(
            pool, weight.data_ptr(), packed.data_ptr(), first, *weight.shape, panel_outputs, panel_offset
        )

    def compress(self, pool: int, panels: "Tensor", layer: CLinear) -> int:
        """Fill ``layer`` except the others and the bias; return the number of others: see ``kvbaton_compress``."""
        num_others: int = self._library.kvbaton_compress(pool, panels.data_ptr(), layer)
        return num_others

    def list_others(self, pool: int, panels: "Tensor", layer: CLinear) -> None:
        """Fill in the others: the weights whose upper byte has no code."""
        self._library.kvbaton_list_others(pool, panels.data_ptr(), layer)

    def linear(
        self,
        pool: int,
        layer: CLinear,
        states: "Tensor",
        output: "Tensor",
        best: "NDArray[np.int64] | None" = None,
    ) -> None:
        """Map ``[num_rows, inputs]`` to float32 ``[num_rows, outputs]``, rounded to bfloat16.

        best ``[num_rows]``: receives the index of each row's highest output, the lowest among equals; -1 if a row has a NaN
        or its highest output is infinite.
        """
        of_best = None if best is None else address_of(best)
        num_rows = states.shape[0]
        self._library.kvbaton_linear(pool, layer, states.data_ptr(), num_rows, output.data_ptr(), of_best)

    def draw(
        self,
        pool: int | None,
        draws: "NDArray[np.void]",
        size: int,
        scratch: "NDArray[np.int64]",
        tokens: "NDArray[np.int64]",
    ) -> None:
        """Sample a token for each of ``draws`` (``DRAW``), from ``size`` scores each; scratch: ``draw_scratch`` per thread.

        Without a pool the caller's thread samples alone.
        """
        addresses = (address_of(draws), len(draws), size, address_of(scratch), address_of(tokens))
        self._library.kvbaton_draw(pool, *addresses)

    def draw_scratch(self, size: int) -> int:
        """Return the size of each thread's scratch, in int64 elements, to sample from ``size`` scores."""
        num_numbers: int = self._library.kvbaton_draw_scratch(size)
        return num_numbers

    def scratch_bytes(self, model: CModel) -> int:
        """Return the scratch bytes of each thread."""
        num_bytes: int = self._library.kvbaton_scratch_bytes(ctypes.byref(model))
        return num_bytes

    def launch(self, pool: int, step: CStep) -> None:
        """Start all layers and the last norm: ``step.input_ids`` to the rows of ``step.normed``. Call ``wait`` before more.

        ``step`` and what it points to must stay as they are until then. A pool of one thread computes within ``wait``.
        """
        self._library.kvbaton_launch(pool, step)

    def wait(self, pool: int) -> bool:
        """Help with what was launched, until it is computed; False where it was interrupted."""
        return bool(self._library.kvbaton_wait(pool))

    def interrupt(self, pool: int) -> None:
        """End what was launched behind the layer that is computed, if that step may be; from any thread."""
        self._library.kvbaton_interrupt(pool)


def address_of(array: Any) -> int:
    """Return the address of a numpy array's data, 0 for an empty one. This runs less Python code than ``array.ctypes``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array)) if array.size else 0


@cache
def load_kernels() -> Kernels | None:
    """Return the kernels; None if they are unavailable, which is logged once."""
    try:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise NotCompiledError(f"they require x86-64, and this is {platform.machine()}")
        library = LIBRARY.load()
        if not library.kvbaton_is_served_here():
            raise NotCompiledError("this processor has no AVX-512 with bfloat16 (avx512_bf16)")
        return Kernels(library)
    except (NotCompiledError, AttributeError) as error:
        logger.warning("plain torch in place of the kernels takes two to four times as long: %s", error)
        return None


if __name__ == "__main__":
    LIBRARY.compile_to(Path(sys.argv[1]))
