"""The work of the compiling threads: machines of grammars, and matchers of requests, measured as they are built.

What a grammar takes is measured on the C heap, whose free pages are returned to the system. The text of each token comes
from the model folder's ``tokenizer.json``, in the grammar library's form.
"""

import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer

from contract.errors import SettingError, UnsupportedFieldError
from contract.model_folder import MAX_TOKENIZER_BYTES, read_text
from contract.requests import EngineRequest
from contract.sampling import Grammar
from engine.grammar.llguidance_matcher import build_matcher
from engine.grammar.machine import MOST_GROWTH_AT_ONCE, MOST_GROWTH_PER_SECOND, LiveMachines, Machine
from engine.grammar.matcher import GrammarMatcher

_MAX_ID = 2**24 - 1
VocabularyLoader = Callable[[Path, Sequence[int]], LLTokenizer]
HeapMeter = Callable[[], int]


def load_vocabulary(folder: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Load the vocabulary of byte-level BPE or of sentencepiece with byte fallback. Takes up to a second.

    Raises UnsupportedFieldError about ``grammar`` if the library cannot read the tokenizer.
    """
    try:
        text = read_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        if text is None:
            raise SettingError(f"{folder} has no tokenizer.json", param="model")
        spec = json.loads(text)
        added = [token["id"] for token in spec["added_tokens"]]
        vocab = spec["model"]["vocab"]
        own = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        # The library's table is as long as the largest token id.
        if not all(0 <= token <= _MAX_ID for token in (*added, *own)):
            raise ValueError(f"a token id is not in 0..{_MAX_ID}")
        ends = [token for token in eos_token_ids if token in added] or added[:1] or None
        return LLTokenizer(text, eos_token=ends)
    except (
        SettingError,
        OSError,
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise UnsupportedFieldError(
            f"grammars are not served with this model, its tokenizer cannot be read for them: {error}",
            param="grammar",
        ) from error


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def heap_meter() -> HeapMeter:
    """Return a function that gives the bytes in use on the C heap by all threads; always 0 if the C library has no count."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return lambda: 0
    read.restype = _Mallinfo2

    def num_bytes() -> int:
        found = read()
        return int(found.uordblks) + int(found.hblkhd)

    return num_bytes


class HeapTrimmer:
    """Returns free pages of the C heap to the system, once for each ``every_bytes`` built. Thread-safe.

    The library builds each grammar in the arena of the thread that compiles it, and glibc returns only the top of an arena.
    Does nothing if the C library has no ``malloc_trim``.
    """

    def __init__(self, every_bytes: int = 2**23) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._every_bytes = every_bytes
        self._lock = threading.Lock()
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """Record that ``num_bytes`` were built."""
        with self._lock:
            self._num_bytes += num_bytes

    def trim(self) -> bool:
        """Trim the heap if enough was built since the last time. Returns whether it was."""
        with self._lock:
            is_due = self._trim is not None and self._num_bytes >= self._every_bytes
            if is_due:
                self._num_bytes = 0
        if self._trim and is_due:
            self._trim(0)  # without the lock: it may take 14 ms
        return is_due


@dataclass
class _Growth:
    """The bytes by which the heap has grown."""

    num_bytes: int = 0


class MachineBuilder:
    """Owns the vocabulary, which is loaded at first use. Thread-safe.

    vocab_size: the model's; ids beyond the tokenizer's are never allowed.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], LLTokenizer],
        vocab_size: int,
        live: LiveMachines,
        trimmer: HeapTrimmer,
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._loaded: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._vocab_size = vocab_size
        self._live = live
        self._measure = heap_meter()
        self._trimmer = trimmer

    def build(self, grammar: Grammar) -> Machine:
        """Compile a grammar. Raises InvalidRequestError for one that does not compile."""
        vocabulary = self._vocabulary()
        with self._measure_growth() as growth:
            matcher = build_matcher(grammar, vocabulary)
        return Machine(matcher, growth.num_bytes)

    def begin(self, engine_request: EngineRequest, machine: Machine) -> GrammarMatcher:
        """Return a request's matcher behind the tokens that were delivered.

        Raises OverloadedError for a large grammar while other large ones are in use.
        """
        ends = self._vocabulary().eos_tokens
        num_before = len(engine_request.prompt_token_ids) - engine_request.num_delivered_tokens
        bytes_before = machine.num_bytes
        with self._measure_growth() as growth:
            matcher = GrammarMatcher(machine, ends, engine_request, self._vocab_size)
            matcher.advance(engine_request.prompt_token_ids[num_before:])
        machine.begin(bytes_before, growth.num_bytes)
        self._live.check_heavy(machine)
        return matcher

    @contextmanager
    def _measure_growth(self) -> Iterator[_Growth]:
        """Measure by how much the block grows the heap, even if it fails."""
        growth = _Growth()
        before = self._measure()
        began = time.thread_time()
        try:
            yield growth
        finally:
            # Other threads' work counts as well, up to what this thread can have built in its processor time: a worker that
            # has just started allocates much, and a small grammar must not be dropped for it.
            most = MOST_GROWTH_AT_ONCE + int((time.thread_time() - began) * MOST_GROWTH_PER_SECOND)
            growth.num_bytes = min(max(0, self._measure() - before), most)
            self._trimmer.note(growth.num_bytes)

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:  # once, even if the first two grammars come together
            if self._loaded is None:
                self._loaded = self._load_vocabulary()
            return self._loaded
