"""llama.cpp by the low-level API of llama-cpp-python: every ``llama_decode`` carries one token of each sequence.

The checkpoint is written as a GGUF file in bfloat16 once (``gguf_checkpoint.py``). Drawing the most likely token with numpy
is part of the time.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.gguf_checkpoint import write_gguf
from benchmarks.peers.work import Generate, Load, Prompts, run_peer

_BATCH, _MICRO_BATCH = 4096, 512
_MIN_CONTEXT = 256
Token = tuple[int, int, int, bool]
"""Token id, position, sequence, and whether its logits are wanted."""


def start(load: Load) -> tuple[Generate, dict[str, Any]]:
    """See ``Start``."""
    import llama_cpp

    engine = _Engine(llama_cpp, load)

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        engine.forget()
        rows = enumerate(prompts)
        asked = [
            (token, place, row, place == len(prompt) - 1)
            for row, prompt in rows
            for place, token in enumerate(prompt)
        ]
        steps = [engine.decode(asked)]
        for number in range(num_tokens - 1):
            last = enumerate(zip(steps[-1], prompts, strict=True))
            steps.append(
                engine.decode([(token, len(prompt) + number, row, True) for row, (token, prompt) in last])
            )
        return [list(answer) for answer in zip(*steps, strict=True)]

    system = llama_cpp.llama_print_system_info().decode()
    return generate, {"versions": {"llama-cpp-python": llama_cpp.__version__}, "computes_with": system}


class _Engine:
    """A model and a context with room for all sequences."""

    def __init__(self, library: Any, load: Load) -> None:
        self._library = library
        file = Path(load.artefact) / "model.gguf"
        if not file.exists():
            write_gguf(Path(load.model), file)
        library.llama_backend_init()
        model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        wanted = library.llama_context_default_params()
        wanted.n_ctx = max(load.max_num_seqs * _MIN_CONTEXT, 4 * load.max_model_len)
        wanted.n_batch, wanted.n_ubatch, wanted.n_seq_max = _BATCH, _MICRO_BATCH, load.max_num_seqs
        wanted.n_threads = wanted.n_threads_batch = load.num_threads
        wanted.kv_unified = True
        self._context = library.llama_init_from_model(model, wanted)
        if not self._context:
            raise RuntimeError("llama.cpp has no room for its context")
        self._batch = library.llama_batch_init(_BATCH, 0, 1)

    def forget(self) -> None:
        """Empty the KV cache."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def decode(self, tokens: list[Token]) -> list[int]:
        """The most likely next token behind each token whose logits are wanted."""
        found = []
        for begin in range(0, len(tokens), _BATCH):
            found += self._decode(tokens[begin : begin + _BATCH])
        return found

    def _decode(self, tokens: list[Token]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, place, row, wants_logits) in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.logits[index] = token, place, wants_logits
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        failed = self._library.llama_decode(self._context, batch)
        if failed:
            raise RuntimeError(f"llama_decode gave {failed}")
        return [self._best(index) for index, (*_, wants_logits) in enumerate(tokens) if wants_logits]

    def _best(self, index: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))


if __name__ == "__main__":
    run_peer(start)
