"""The dummy batch by which a rank measures how much memory a full step takes."""

import numpy as np

from engine.compute.inputs import PreparedInputs


def profile_inputs(lengths: list[int]) -> PreparedInputs:
    """Inputs of new requests with these numbers of tokens, all of them token 0; nothing has a place in the KV cache."""
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
