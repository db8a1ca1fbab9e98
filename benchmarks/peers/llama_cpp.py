"""llama.cpp with the low-level API of llama-cpp-python: every ``llama_decode`` has one token of each sequence.

The checkpoint is converted to a bfloat16 GGUF file once (``gguf_checkpoint.py``). The time includes the argmax in numpy.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.gguf_checkpoint import write_gguf
from benchmarks.peers.work import Generate, Load, Prompts, run_peer

_BATCH = 4096
_MICRO_BATCH = 512
_MIN_CONTEXT = 256
Token = tuple[int, int, int, bool]
"""(token id, position, sequence, whether its logits are needed)."""


def start(load: Load) -> tuple[Generate, dict[str, Any]]:
    """Load the engine; see ``Start``."""
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
        wanted.n_batch = _BATCH
        wanted.n_ubatch = _MICRO_BATCH
        wanted.n_seq_max = load.max_num_seqs
        wanted.n_threads = wanted.n_threads_batch = load.num_threads
        wanted.kv_unified = True
        self._context = library.llama_init_from_model(model, wanted)
        if not self._context:
            raise RuntimeError("llama.cpp could not allocate its context")
        self._batch = library.llama_batch_init(_BATCH, 0, 1)

    def forget(self) -> None:
        """Empty the KV cache."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def decode(self, tokens: list[Token]) -> list[int]:
        """Return the most likely next token after each token whose logits are needed."""
        found = []
        for begin in range(0, len(tokens), _BATCH):
            found += self._decode(tokens[begin : begin + _BATCH])
        return found

    def _decode(self, tokens: list[Token]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, place, row, wants_logits) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = place
            batch.logits[index] = wants_logits
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
        failed = self._library.llama_decode(self._context, batch)
        if failed:
            raise RuntimeError(f"llama_decode gave {failed}")
        return [self._best(index) for index, (*_, wants_logits) in enumerate(tokens) if wants_logits]

    def _best(self, index: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))


if __name__ == "__main__":
    run_peer(start)
