"""What the rest of the engine needs to know of the loaded model: plain data, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """The model as it was really loaded.

    max_model_len: tokens that prompt and answer may have together. eos_token_ids: the model's own end tokens.
    fingerprint: ``contract.layout.model_fingerprint`` with the dtype that is computed in. dtype: never "auto". has_head:
    tokens can be drawn; without it there are embeddings only.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    dtype: str
    has_head: bool = True
