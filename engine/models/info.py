"""The properties of the loaded model that the rest of the engine needs: plain data, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """The model as it was loaded.

    max_model_len: maximum length of prompt and answer together, in tokens. eos_token_ids: the model's own end tokens.
    fingerprint: ``contract.layout.model_fingerprint`` with the dtype of the computation. dtype: never "auto". has_head:
    tokens can be sampled; a model without a head gives embeddings only. num_kv_heads: of all ranks together, each counted
    once; 0: those of the KV layout, on one rank.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    dtype: str
    has_head: bool = True
    num_kv_heads: int = 0
