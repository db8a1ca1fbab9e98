"""The bounds of an engine: those of its model and of its KV cache."""

from dataclasses import dataclass

from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.requests.request import Request


@dataclass(frozen=True)
class Limits:
    """The largest request that an engine can run, and what it is checked against.

    max_length: tokens that prompt and answer may have together. num_blocks: usable KV blocks. vocab_size: bounds the token
    ids that another worker may send. model_fingerprint: what the hashes of computed blocks start from.
    """

    max_length: int
    num_blocks: int
    vocab_size: int
    model_fingerprint: str

    @classmethod
    def of(cls, pool: BlockPool, max_model_len: int, vocab_size: int, model_fingerprint: str) -> "Limits":
        """Return the limits of an engine with this pool; the model's own length is ``max_model_len``."""
        max_length = min(max_model_len, pool.num_usable_blocks * pool.block_size)
        return cls(max_length, pool.num_usable_blocks, vocab_size, model_fingerprint)

    def why_impossible(self, request: Request) -> str | None:
        """Return why the request can never run in this engine; None if it can."""
        num_prompt = request.num_prompt_tokens
        if request.is_pooling and num_prompt > self.max_length:
            return (
                f"the prompt has {num_prompt} tokens; this engine takes {self.max_length} at most: shorten it"
            )
        if num_prompt + 1 > self.max_length and not request.is_pooling:
            return (
                f"the prompt has {num_prompt} tokens; with at least one token of answer this engine takes "
                f"{self.max_length - 1} at most: shorten it"
            )
        num_tokens = num_prompt + 1 if request.is_receiving else num_prompt
        num_blocks = blocks_needed(num_tokens, request.block_size)
        if num_blocks > self.num_blocks:
            return (
                f"the prompt of {num_prompt} tokens needs {num_blocks} KV blocks of {request.block_size} tokens, "
                f"the engine has {self.num_blocks}: shorten it or raise kv_cache_bytes"
            )
        return None
