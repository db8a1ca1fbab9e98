"""Dummy batches: one that takes the memory of a full step, to measure it, and one for warm-up."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from contract.requests import PoolingParams
from contract.sampling import SamplingParams
from engine.attention.splits import LONG_CONTEXT
from engine.compute.inputs import PreparedInputs
from engine.kv_cache.memory import TORCH_DTYPES
from engine.models.config import ModelInfo
from engine.models.loading import LoadedModel
from engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput

_WARM_UP_ID = "warm-up"


def profile_inputs(lengths: list[int]) -> PreparedInputs:
    """Return inputs of new requests with these numbers of tokens, all of id 0, without a place in the KV cache."""
    counts = np.array(lengths, dtype=np.int32)
    query_start_loc = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    num_tokens = int(query_start_loc[-1])
    nowhere = np.zeros(num_tokens, dtype=np.int32)
    longest = int(counts.max())
    return PreparedInputs(
        req_ids=[f"profile-{index}" for index in range(len(lengths))],
        generation=0,
        rows=np.arange(len(lengths), dtype=np.int32),
        request_indices=np.repeat(np.arange(len(lengths), dtype=np.int32), counts),
        positions=np.arange(num_tokens, dtype=np.int32) - np.repeat(query_start_loc[:-1], counts),
        token_indices=nowhere.astype(np.int64),
        input_ids=nowhere,
        block_table_indices=nowhere.astype(np.int64),
        block_numbers=nowhere,
        block_offsets=nowhere,
        slot_mapping=nowhere.astype(np.int64),
        num_scheduled_tokens=counts,
        num_computed_tokens=np.zeros_like(counts),
        seq_lens=counts,
        num_wanted=counts,
        query_start_loc=query_start_loc,
        block_table=np.zeros((len(lengths), longest), dtype=np.int32),
    )


def reserving_steps(block_size: int) -> list[PreparedInputs]:
    """Return steps in the null block that take all of a backend's workspaces, and have its kernels compiled.

    They are a chunk, a decode, and a short chunk behind a long context. Positions stay small: a model may have few.
    """
    chunk = profile_inputs([2])
    behind = np.full_like(chunk.seq_lens, LONG_CONTEXT)
    table = np.zeros((1, -(-(LONG_CONTEXT + 2) // block_size)), dtype=np.int32)
    long = replace(chunk, num_computed_tokens=behind, seq_lens=behind + chunk.seq_lens, block_table=table)
    return [chunk, profile_inputs([1]), long]


def null_layers(loaded: LoadedModel, block_size: int, device: torch.device) -> list[Tensor]:
    """Return the layers of a pool with the null block only, which those of one shape share."""
    config = loaded.config
    sizes = [config.cache_shape(1, block_size, layer) for layer in range(config.num_layers)]
    dtype = TORCH_DTYPES[loaded.info.kv_dtype]
    shared = {size: torch.zeros(size, dtype=dtype, device=device) for size in set(sizes)}
    return [shared[size] for size in sizes]


def warm_up_steps(model: ModelInfo, max_num_batched_tokens: int, max_length: int) -> list[SchedulerOutput]:
    """Return the steps of a dummy request in the null block, up to its end: a prompt, and a token more if there is room.

    So the kernels of both kinds of steps are compiled before the first request. max_length: of any request, in tokens.
    """
    num_tokens = min(2, max_length, max_num_batched_tokens)
    dummy = NewRequestData(
        req_id=_WARM_UP_ID,
        prompt_token_ids=[0] * num_tokens,
        sampling_params=SamplingParams() if model.has_head else None,
        pooling_params=None if model.has_head else PoolingParams("last"),
        block_ids=([0],),
        num_computed_tokens=0,
        num_prompt_tokens=num_tokens,
    )
    prompt = SchedulerOutput(
        [dummy], num_scheduled_tokens={_WARM_UP_ID: num_tokens}, total_num_scheduled_tokens=num_tokens
    )
    steps = [prompt]
    if model.has_head and num_tokens < max_length:
        known = CachedRequestData([_WARM_UP_ID], [False], [], [([],)], [num_tokens])
        answer = SchedulerOutput(
            scheduled_cached_reqs=known, num_scheduled_tokens={_WARM_UP_ID: 1}, total_num_scheduled_tokens=1
        )
        steps.append(answer)
    return [*steps, SchedulerOutput(finished_req_ids={_WARM_UP_ID})]
