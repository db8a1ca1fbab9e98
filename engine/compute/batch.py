"""The persistent batch: the runner's state of every request, and the two tables that hold it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from contract.cache_layout import CacheLayout
from contract.errors import InternalError
from contract.requests import PoolingParams
from contract.sampling import SamplingParams, choice_seed
from engine.outputs import NewRequestData, SchedulerOutput
from engine.sampling.logits_processors import NO_TOKENS, SamplingRow


@dataclass
class RequestState:
    """The runner's state of one request.

    num_tokens: tokens so far, prompt and sampled. block_ids: one list for each group of layers. num_computed_tokens: those
    whose KV is in these blocks before the next step. num_choices: the number of tokens to sample behind the prompt, the
    first for this request itself. row: its row in the tables, None while others need all rows; ``parked_tokens`` then keeps
    its tokens. pooling: no token is sampled. pooled_states: float64 ``[hidden_size]``, the sum of the states of computed
    tokens if their mean is requested, or their largest values if the maximum is.
    """

    req_id: str
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    num_choices: int = 1
    pooling: PoolingParams | None = None
    pooled_states: NDArray[np.float64] | None = None
    row: int | None = None
    parked_tokens: list[int] = field(default_factory=list)

    def num_wanted(self, num_scheduled: int, num_drafts: int) -> int:
        """Return the number of the step's last tokens whose final state is read.

        All, the newest one and its drafts, or none. num_drafts: how many of the tokens are drafts.
        """
        if self.sampling.prompt_logprobs is not None or (self.pooling and self.pooling.is_over_all_tokens):
            return num_scheduled
        return 1 + num_drafts if self.num_computed_tokens + num_scheduled >= self.num_tokens else 0

    @property
    def is_greedy(self) -> bool:
        """True if the next token is that of the model's highest logit, unless a grammar forbids it."""
        num_generated = self.num_tokens - self.num_prompt_tokens
        is_one = self.num_choices == 1 or num_generated > 0
        return self._best_from is not None and is_one and num_generated >= self._best_from

    @cached_property
    def _best_from(self) -> int | None:
        """The number of answer tokens from which on it takes the best token; None: never."""
        least = self.sampling.min_tokens
        if not SamplingRow(self.sampling, self.eos_token_ids, 0, least).is_greedy:
            return None
        return least if self.sampling.end_token_ids(self.eos_token_ids) else 0


class BlockTables:
    """A block table ``[num_rows, max_blocks]`` of int32 for each group of layers; unused cells are 0, the null block.

    of_groups: these. of_states: another one, of one column: the slot of a request's states (0: none); None without recurrent
    layers. tables: all of them, that of the states last.
    """

    def __init__(self, num_rows: int, max_blocks: int, cache: CacheLayout | None) -> None:
        num_groups = 1 if cache is None else len(cache.groups)
        self.of_groups: list[NDArray[np.int32]] = [
            np.zeros((num_rows, max_blocks), dtype=np.int32) for _ in range(num_groups)
        ]
        self.of_states: NDArray[np.int32] | None = None
        self.tables = self.of_groups
        if cache is not None and cache.states is not None:
            self.of_states = np.zeros((num_rows, 1), dtype=np.int32)
            self.tables = [*self.of_groups, self.of_states]

    def clear(self, row: int) -> None:
        """Remove all blocks of a row."""
        for table in self.tables:
            table[row] = 0

    def append(self, state: RequestState, block_ids: Sequence[list[int]]) -> None:
        """Add blocks behind those that the request has, in each group; groups that are not given get none."""
        new = [*block_ids, *([] for _ in self.tables[len(block_ids) :])]
        old = state.block_ids
        state.block_ids = tuple([*kept, *own] for kept, own in zip(old, new, strict=True))
        for table, kept, own in zip(self.tables, old, state.block_ids, strict=True):
            if len(own) > table.shape[1]:
                raise InternalError(
                    f"request {state.req_id!r} has {len(own)} blocks; the table has {table.shape[1]}"
                )
            table[state.row, len(kept) : len(own)] = own[len(kept) :]


class InputBatch:
    """Owns the token table ``[max_num_reqs, max_model_len]`` and the block table ``[max_num_reqs, max_blocks]``.

    Both are int32; unused cells of the block table are 0, the null block. max_blocks = ceil(max_model_len /
    block_size). A request keeps its row from its first step to its end, unless rows run short: then a request that is not
    scheduled in the step loses its row, and gets another when it runs again. generation: counts all changes except those
    of continuing requests. While it is unchanged, rows are unchanged, and each request has computed what was scheduled last.

    cache: the groups of layers, each of which has a table of its own in ``block_tables``, in their order; None: one group.
    tables: all of them; with recurrent layers a request's blocks end with its slot.
    """

    def __init__(
        self, max_num_reqs: int, max_model_len: int, block_size: int, cache: CacheLayout | None = None
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.token_table: NDArray[np.int32] = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        self.cache = cache
        self.tables = BlockTables(max_num_reqs, max_blocks, cache)
        self.block_tables = self.tables.of_groups
        self.block_table = self.block_tables[0]
        self.requests: dict[str, RequestState] = {}
        self.generation = 0
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    def update(self, scheduled: SchedulerOutput) -> None:
        """Update the tables to the state before this step: remove finished requests, add new ones, extend the rest."""
        for req_id in scheduled.finished_req_ids:
            self._remove(req_id)
        counts = scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            self._add(new, counts)
        cached = scheduled.scheduled_cached_reqs
        # New blocks are appended; a resumed request gets all of them anew, and the tokens, where given.
        for index, req_id in enumerate(cached.req_ids):
            state = self.requests.get(req_id)
            if state is None:
                raise InternalError(f"request {req_id!r} is scheduled as known but unknown to the runner")
            is_resumed = cached.resumed_from_preemption[index]
            tokens = cached.new_token_ids[index] if cached.new_token_ids else []
            if tokens and not is_resumed:
                raise InternalError(f"request {req_id!r}: new_token_ids come only with a resumed request")
            if state.row is None:
                self._seat(state, counts)
            if tokens:
                self._write_tokens(state, tokens)
            if is_resumed:
                self.generation += 1
            blocks = cached.new_block_ids[index]
            if is_resumed or any(blocks):
                self._write_blocks(state, blocks, is_replacement=is_resumed)
            state.num_computed_tokens = cached.num_computed_tokens[index]
        self._write_drafts(scheduled.scheduled_spec_decode_tokens)

    def row_of(self, req_id: str) -> int:
        """Return the request's row. Raises InternalError for a request without one."""
        state = self.requests.get(req_id)
        if state is None or state.row is None:
            raise InternalError(f"request {req_id!r} is scheduled but unknown to the runner")
        return state.row

    def known_tokens(self, req_id: str) -> NDArray[np.int32]:
        """Return prompt and answer so far, as a view of the table."""
        return self.token_table[self.row_of(req_id), : self.requests[req_id].num_tokens]

    def append_tokens(self, states: Sequence[RequestState], drawn: Sequence[Sequence[int]]) -> None:
        """Append the sampled tokens of each of these requests of the step.

        Tokens beyond the model's positions are dropped, and so are those of a request that has been removed.
        """
        table = self.token_table
        length = self.token_table.shape[1]
        for state, tokens in zip(states, drawn, strict=True):
            if tokens and state.row is not None:
                end = min(state.num_tokens + len(tokens), length)
                table[state.row, state.num_tokens : end] = tokens[: end - state.num_tokens]
                state.num_tokens = end

    def draft_rows(self, req_id: str, bitmasks: Sequence[NDArray[np.int32] | None]) -> list[SamplingRow]:
        """Return the rows that sample its next token and the one behind each draft, as if the drafts were its tokens.

        bitmasks: the tokens that its grammar allows in each place.
        """
        (row,) = self.sampling_rows(req_id, bitmasks[0])
        table = self.token_table[self.row_of(req_id)]
        rows = [row]
        for place, bitmask in enumerate(bitmasks[1:], 1):
            position = row.position + place
            answer = table[row.position - row.num_generated : position]
            rows.append(
                replace(
                    row,
                    position=position,
                    num_generated=row.num_generated + place,
                    answer_tokens=answer if row.sampling.counts_tokens else NO_TOKENS,
                    bitmask=bitmask,
                )
            )
        return rows

    def sampling_rows(self, req_id: str, bitmask: NDArray[np.int32] | None = None) -> list[SamplingRow]:
        """Return the rows that sample its next tokens: one, or behind a prompt of several choices one for each.

        bitmask: the tokens that its grammar allows.
        """
        state = self.requests[req_id]
        num_prompt = state.num_prompt_tokens
        num_known = state.num_tokens
        known = self.known_tokens(req_id) if state.sampling.counts_tokens else NO_TOKENS
        row = SamplingRow(
            state.sampling,
            state.eos_token_ids,
            num_known,
            num_known - num_prompt,
            known[:num_prompt],
            known[num_prompt:],
            bitmask,
        )
        if row.num_generated:
            return [row]
        seeds = [choice_seed(state.sampling.seed, choice) for choice in range(1, state.num_choices)]
        return [row, *(replace(row, sampling=structs.replace(row.sampling, seed=seed)) for seed in seeds)]

    def _add(self, new: NewRequestData, scheduled: dict[str, int]) -> None:
        self._remove(new.req_id)
        if (new.sampling_params is None) is (new.pooling_params is None):
            raise InternalError(f"request {new.req_id!r} needs either sampling or pooling parameters")
        state = RequestState(
            req_id=new.req_id,
            sampling=new.sampling_params or SamplingParams(),
            eos_token_ids=new.eos_token_ids,
            num_prompt_tokens=new.num_prompt_tokens,
            num_tokens=0,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=tuple([] for _ in self.tables.tables),
            num_choices=new.num_choices,
            pooling=new.pooling_params,
        )
        self.requests[new.req_id] = state
        self._seat(state, scheduled)
        self._write_tokens(state, new.prompt_token_ids)
        self._write_blocks(state, new.block_ids, is_replacement=True)

    def _seat(self, state: RequestState, scheduled: dict[str, int]) -> None:
        """Assign the request a row, if necessary that of a request outside this step."""
        self.generation += 1
        if not self._free_rows:
            outside = (
                one for one in self.requests.values() if one.row is not None and one.req_id not in scheduled
            )
            if (other := next(outside, None)) is None:
                raise InternalError(
                    f"more requests are scheduled than the {len(self.token_table)} rows of the tables"
                )
            # Its tokens exist only here; its blocks are listed in its state.
            other.parked_tokens = self.token_table[other.row, : other.num_tokens].tolist()
            self._free_row(other)
        state.row = self._free_rows.pop()
        self._write_tokens(state, state.parked_tokens)
        state.parked_tokens = []
        self._write_blocks(state, state.block_ids, is_replacement=True)

    def _write_tokens(self, state: RequestState, token_ids: Sequence[int]) -> None:
        if len(token_ids) > self.token_table.shape[1]:
            raise InternalError(
                f"request {state.req_id!r} has {len(token_ids)} tokens; the model takes {self.token_table.shape[1]}"
            )
        self.token_table[state.row, : len(token_ids)] = token_ids
        state.num_tokens = len(token_ids)

    def _write_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Write drafts behind the known tokens, where those that are sampled in this step replace them."""
        for req_id, own in drafts.items():
            start = self.requests[req_id].num_tokens
            self.token_table[self.row_of(req_id), start : start + len(own)] = own

    def _write_blocks(
        self, state: RequestState, block_ids: Sequence[list[int]], *, is_replacement: bool
    ) -> None:
        if is_replacement:
            assert state.row is not None, "it is seated"
            self.tables.clear(state.row)
            state.block_ids = tuple([] for _ in self.tables.tables)
        self.tables.append(state, block_ids)

    def _remove(self, req_id: str) -> None:
        state = self.requests.pop(req_id, None)
        if state is not None:
            self._free_row(state)

    def _free_row(self, state: RequestState) -> None:
        if state.row is None:
            return
        self.generation += 1
        self.token_table[state.row] = 0
        self.tables.clear(state.row)
        self._free_rows.append(state.row)
        self._free_rows.sort(reverse=True)
        state.row = None
