"""Embeddings: the final hidden states of a prompt as one vector.

``last`` needs only the state of the prompt's last token, so the others may come from the prefix cache. ``mean`` needs all of
them: the scheduler computes every token, and the sum is carried from chunk to chunk in float64.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import InternalError
from engine.compute.batch import RequestState
from engine.compute.inputs import PreparedInputs
from engine.outputs import ModelRunnerOutput

_LEAST_NORM = 1e-12
"""A vector that is shorter stays shorter than 1."""


def pool(
    states: Tensor, inputs: PreparedInputs, requests: list[RequestState], output: ModelRunnerOutput
) -> None:
    """Write the embeddings that a step has finished into ``output``; skip requests that do not pool.

    states: ``[num_tokens, hidden_size]`` of the step, after the final norm. A vector with NaN or infinity is left out and
    counted in ``num_nans_in_logits``. Raises InternalError if a mean would miss tokens.
    """
    if all(request.pooling is None for request in requests):
        return
    output.pooler_output = [None] * len(requests)
    for index, request in enumerate(requests):
        if request.pooling is None:
            continue
        start, end = inputs.query_start_loc[index : index + 2]
        is_last_chunk = int(inputs.seq_lens[index]) >= request.num_tokens
        if request.pooling.kind == "mean":
            _add(request, states[start:end], int(inputs.num_computed_tokens[index]))
        if is_last_chunk:
            _note(request, index, _vector(request, states[end - 1]), output)


def _add(request: RequestState, states: Tensor, num_computed: int) -> None:
    """Add a chunk to the sum; a chunk from the prompt's start, also after a preemption, begins a new one."""
    if num_computed == 0:
        request.hidden_sum = None
    elif request.hidden_sum is None:
        raise InternalError(f"request {request.req_id!r}: the mean misses its first {num_computed} tokens")
    chunk: NDArray[np.float64] = states.sum(dim=0, dtype=torch.float64).cpu().numpy()
    request.hidden_sum = chunk if request.hidden_sum is None else request.hidden_sum + chunk


def _vector(request: RequestState, last: Tensor) -> NDArray[np.float64]:
    if request.hidden_sum is not None:
        return request.hidden_sum / request.num_tokens
    vector: NDArray[np.float64] = last.to(torch.float64).cpu().numpy()
    return vector


def _note(request: RequestState, index: int, vector: NDArray[np.float64], output: ModelRunnerOutput) -> None:
    if request.pooling and request.pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _LEAST_NORM)
    numbers = vector.astype(np.float32)
    if num_bad := int(numbers.size - np.isfinite(numbers).sum()):
        output.num_nans_in_logits = {**(output.num_nans_in_logits or {}), request.req_id: num_bad}
    else:
        output.pooler_output[index] = numbers.tolist()
