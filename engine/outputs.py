"""The data that scheduler and runner exchange in one step. No tensors.

The names are those of vLLM's V1 engine. ``kv_connector_metadata`` carries this step's orders to the ranks' data halves, and
``kv_tier_orders`` those to the KV tiers of several ranks;
``finished_sending`` and ``finished_recving`` are their completions: a prompt's KV has left (its blocks may be freed)
or has arrived and was verified (the request may run).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contract.requests import PoolingParams
from contract.sampling import SamplingParams
from engine.kv_tiers.orders import TierOrder


@dataclass(frozen=True)
class NewRequestData:
    """A request that the runner gets for the first time.

    ``prompt_token_ids`` are all tokens known at this point: the prompt, and for a request whose KV came from another
    worker the tokens sampled there too. block_ids: one list per KV cache group. num_computed_tokens: tokens whose KV
    is already in those blocks. num_prompt_tokens: how many of the tokens are the client's prompt; what follows is answer.
    num_choices: tokens that are sampled behind the prompt, one for each answer. Either sampling_params or pooling_params.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    num_prompt_tokens: int
    num_choices: int = 1
    eos_token_ids: tuple[int, ...] = ()
    pooling_params: PoolingParams | None = None


@dataclass
class CachedRequestData:
    """Requests that the runner has got before, column by column.

    ``new_block_ids`` are appended to a request's blocks, or replace them where ``resumed_from_preemption`` is True.
    ``new_token_ids`` stays empty without pipeline parallelism; for a resumed request it holds all its tokens.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_from_preemption: list[bool] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class GrammarOutput:
    """The tokens that grammars allow in a step: two fields of its ``SchedulerOutput``."""

    structured_output_request_ids: dict[str, int]
    grammar_bitmask: NDArray[np.int32]


@dataclass
class SchedulerOutput:
    """One forward pass. ``num_scheduled_tokens`` counts tokens to process, not tokens to generate.

    block_copies: (from, to) of KV blocks of each group of layers that are copied before anything is computed; empty: none.
    scheduled_spec_decode_tokens: request → drafts, which are computed behind its newest token: all its scheduled tokens but
    one. Only in steps in which all requests continue their answers. num_draft_tokens: request → number of drafts that the
    runner proposes behind the tokens of this step. num_compared_tokens: request → number of its newest tokens, those of this
    step included, with which the runner compares what it would have proposed before them.
    structured_output_request_ids: request → its row of ``grammar_bitmask``, int32 ``[num_rows, ceil(vocab_size / 32)]``,
    for those with a grammar that sample a token in this step: token t is allowed if bit t % 32 of word t // 32 is set.
    A row for the token behind each draft follows it.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    num_draft_tokens: dict[str, int] = field(default_factory=dict)
    num_compared_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    block_copies: list[list[tuple[int, int]]] = field(default_factory=list)
    structured_output_request_ids: dict[str, int] = field(default_factory=dict)
    grammar_bitmask: NDArray[np.int32] | None = None
    kv_connector_metadata: Any | None = None
    kv_tier_orders: list[TierOrder] = field(default_factory=list)

    @property
    def is_decode_only(self) -> bool:
        """True if each request computes one known token, and drafts behind it."""
        is_short = self.total_num_scheduled_tokens == len(self.num_scheduled_tokens)
        return is_short or bool(self.scheduled_spec_decode_tokens)

    def add_grammar_output(self, masks: GrammarOutput) -> None:
        """Set the masks of an order that was made without them."""
        self.structured_output_request_ids = masks.structured_output_request_ids
        self.grammar_bitmask = masks.grammar_bitmask

    def bitmask_of(self, req_id: str, place: int = 0) -> NDArray[np.int32] | None:
        """Return the tokens that the request may sample; None if it has no grammar, or samples nothing.

        place: the number of its drafts before the sampled token.
        """
        row = self.structured_output_request_ids.get(req_id)
        return None if row is None or self.grammar_bitmask is None else self.grammar_bitmask[row + place]


class LogprobsLists(NamedTuple):
    """Log probabilities of the sampled tokens, row i for request i.

    logprob_token_ids, logprobs: ``[num_reqs, k + 1]``, the sampled token first, then the k best in order.
    sampled_token_ranks: ``[num_reqs]``, 1 is the best token. cu_num_generated_tokens: ``[num_reqs]``, the first row of each
    request, if one of them has sampled several tokens; a row for each token follows it.
    """

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class OtherChoices:
    """The tokens that were sampled behind a prompt for choices 1 and up; row i is choice i + 1."""

    token_ids: list[int]
    logprobs: LogprobsLists | None = None


@dataclass
class ModelRunnerOutput:
    """The results of one forward pass. A request whose prompt is not finished has an empty list of sampled ids.

    sampled_token_ids: row i for request i; several tokens where its first drafts were equal to the tokens sampled in their
    places. spec_token_ids: row i for request i, the drafts proposed behind these tokens; empty if none were requested.
    num_right_drafts: by request, the number of compared drafts before the first wrong one; without those that had none.
    other_choices: by request, if its prompt is finished and it asks for several answers. prompt_logprobs_dict: by
    request, a row for each token of the prompt that follows one which was computed. pooler_output: empty if no request
    pools, else row i for request i: the float32 numbers of its embedding, None until its prompt is finished.
    was_interrupted: there are no results, and everything is to be scheduled again.
    """

    req_ids: list[str] = field(default_factory=list)
    req_id_to_index: dict[str, int] = field(default_factory=dict)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    spec_token_ids: list[list[int]] = field(default_factory=list)
    num_right_drafts: dict[str, int] = field(default_factory=dict)
    logprobs: LogprobsLists | None = None
    other_choices: dict[str, OtherChoices] = field(default_factory=dict)
    prompt_logprobs_dict: dict[str, LogprobsLists] = field(default_factory=dict)
    pooler_output: list[list[float] | None] = field(default_factory=list)
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    num_nans_in_logits: dict[str, int] | None = None
    was_interrupted: bool = False
