"""The scheduler's state of one request: where it is in its life, its tokens, and how much of them is computed."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from contract.block_hash import BlockHash, block_hash, full_block_hashes
from contract.errors import ErrorKind
from contract.outputs import EngineOutput, RequestTimings, TokenLogprobs, TransferReport
from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer
from engine.connector import Received
from engine.grammar.matcher import GrammarMatcher
from engine.outputs import LogprobsLists
from engine.scheduling.block_pool import blocks_needed
from engine.scheduling.ending import Ending, RequestStatus, ended_by_error
from engine.scheduling.token_logprobs import logprobs_in_rows


@dataclass
class Milestones:
    """When things happened to a request, in seconds of the scheduler's clock; None for what has not happened."""

    queued: float
    scheduled: float | None = None
    prefilled: float | None = None
    transfer: TransferReport = field(default_factory=TransferReport)

    def split(self) -> RequestTimings:
        """The durations between them."""
        scheduled = self.queued if self.scheduled is None else self.scheduled
        return RequestTimings(
            queue_seconds=scheduled - self.queued,
            prefill_seconds=0.0 if self.prefilled is None else self.prefilled - scheduled,
            transfer=self.transfer,
        )


@dataclass(eq=False)
class Request:
    """One EngineRequest in the scheduler's hands; the scheduler alone changes it.

    arrival_number: counts the scheduler's requests and their choices; no two have the same. expires: when it must have
    ended, on the scheduler's clock. dismissed: choices that nobody wants any more. is_fork: another choice has computed, or
    received, the prompt.

    token_ids: all known tokens: the prompt, then the answer's. num_computed_tokens: how many of them have their KV in
    this request's blocks. num_emitted_tokens: tokens that left this engine as output. hash_root: what ``block_hashes``
    start from; computed_root: what they start from for KV that this engine computes. structured_output_request: where
    the answer stands in its grammar; None without one, and while that is compiled. received: what came with the prompt's
    KV from another worker; None but between its arrival and the request's first step.
    """

    asked: EngineRequest
    token_ids: list[int]
    milestones: Milestones
    arrival_number: int
    block_size: int
    computed_root: BlockHash
    hash_root: BlockHash
    block_hashes: list[BlockHash]
    expires: float
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_indexed_blocks: int = 0
    num_emitted_tokens: int = 0
    num_cached_tokens: int = 0
    is_known_to_runner: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_fork: bool = False
    dismissed: set[int] = field(default_factory=set)
    structured_output_request: GrammarMatcher | None = None
    received: Received | None = None

    @classmethod
    def from_engine_request(
        cls,
        asked: EngineRequest,
        model_fingerprint: str,
        block_size: int,
        *,
        now: float = 0.0,
        arrival_number: int = 0,
    ) -> "Request":
        """A request that has just arrived."""
        root = asked.hash_root(model_fingerprint)
        return cls(
            asked=asked,
            token_ids=list(asked.prompt_token_ids),
            milestones=Milestones(queued=now),
            arrival_number=arrival_number,
            block_size=block_size,
            computed_root=root,
            hash_root=root,
            block_hashes=full_block_hashes(root, asked.prompt_token_ids, block_size),
            expires=now + asked.deadline_seconds,
        )

    def fork(self, choice: int) -> "Request":
        """Another choice of its prompt, which is computed: at the same place, without blocks of its own."""
        matcher = self.structured_output_request
        return replace(
            self,
            asked=self.asked.of_choice(choice),
            token_ids=list(self.token_ids),
            block_hashes=list(self.block_hashes),
            milestones=replace(self.milestones),
            arrival_number=self.arrival_number + choice,
            status=RequestStatus.WAITING,
            is_known_to_runner=False,
            is_fork=True,
            dismissed=set(),
            structured_output_request=matcher.fork() if matcher else None,
            received=None,
        )

    @cached_property
    def key(self) -> str:
        """The engine's own name for this choice of this attempt."""
        return self.asked.key

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Those that end its answer, from its ``min_tokens`` on."""
        sampling = self.asked.sampling
        return frozenset(sampling.stop_token_ids) | frozenset(
            () if sampling.ignore_eos else self.eos_token_ids
        )

    @property
    def client_index(self) -> int:
        """Index of the front end that sent the request; its outputs go back there."""
        return self.asked.client_index

    @property
    def arrival_time(self) -> float:
        """When the front end received it, on the front end's clock."""
        return self.asked.arrival_time

    @property
    def priority(self) -> int:
        """Higher runs earlier."""
        return self.asked.priority

    @property
    def precedence(self) -> tuple[int, int]:
        """The lower, the earlier it is served and the later it is preempted: by priority, then arrival."""
        return -self.priority, self.arrival_number

    @property
    def cache_salt(self) -> str:
        """Part of the block hash: requests with different salts never share cached KV."""
        return self.asked.cache_salt

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens."""
        return self.asked.eos_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.asked.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Length of everything known."""
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens whose KV is not computed yet; 1 for a request that decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def answer_length(self) -> int:
        """Tokens of the whole answer so far, those that other engines emitted included."""
        return self.asked.first_index + self.num_emitted_tokens

    @property
    def is_sending(self) -> bool:
        """A prefill leg: lends its KV to another worker and ends after one token."""
        return isinstance(self.asked.transfer, SendTransfer)

    @property
    def is_receiving(self) -> bool:
        """A decode leg: its prompt's KV comes from another worker."""
        return isinstance(self.asked.transfer, ReceiveTransfer)

    @property
    def is_pooling(self) -> bool:
        """Asks for an embedding: it ends when its prompt is computed."""
        return self.asked.pooling_params is not None

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is not computed, and that is not the prompt's."""
        return self.num_missing_tokens == 1 and self.num_tokens > self.num_prompt_tokens

    def append_token(self, token_id: int) -> None:
        """The answer grew by one token."""
        self.token_ids.append(token_id)
        if self.num_tokens % self.block_size == 0:
            parent = self.block_hashes[-1] if self.block_hashes else self.hash_root
            self.block_hashes.append(block_hash(parent, self.token_ids[-self.block_size :]))

    def hash_from(self, fingerprint: str) -> None:
        """Its KV is not what this engine would compute: find and keep its blocks under hashes of their own (law 7)."""
        self._hash_under(self.asked.hash_root(fingerprint))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Its client asked for the log probabilities of the prompt, and not all are known: no token may be skipped."""
        is_asked = self.asked.sampling.prompt_logprobs is not None and not self.is_receiving
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def take_prompt_logprobs(self, lists: LogprobsLists | None) -> None:
        """What a step has given of them, in order."""
        num_alternatives = self.asked.sampling.prompt_logprobs
        if lists is not None and num_alternatives is not None and self.lacks_prompt_logprobs:
            self.prompt_logprobs += logprobs_in_rows(lists, num_alternatives)

    def reusable_hashes(self) -> list[BlockHash]:
        """Hashes of blocks that may come from the cache while the newest token is still computed here (for its logits).

        None where every token of the prompt has something to tell: its log probability, or its part of a mean.
        """
        is_mean = self.asked.pooling_params and self.asked.pooling_params.kind == "mean"
        if self.lacks_prompt_logprobs or is_mean:
            return []
        return self.block_hashes[: (self.num_tokens - 1) // self.block_size]

    def find_computed(self, num_blocks: int, *, is_first: bool) -> None:
        """The cache holds its first ``num_blocks`` blocks; the client hears of those found at the first time only."""
        self.num_computed_tokens = num_blocks * self.block_size
        self.num_indexed_blocks = num_blocks
        if is_first:
            self.num_cached_tokens = self.num_computed_tokens

    def receive(self, received: Received, first_token: int, now: float) -> None:
        """The prompt's KV has arrived from another worker, and was verified; ``first_token`` was sampled there."""
        self.num_computed_tokens = self.num_prompt_tokens
        self.append_token(first_token)
        self.milestones.queued = now
        self.milestones.transfer = received.report
        self.received = None

    def lose_blocks(self) -> None:
        """Its blocks were taken away: everything must be computed again, here, whoever computed it before."""
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.num_indexed_blocks = 0
        if self.lacks_prompt_logprobs:
            self.prompt_logprobs = []
        if self.hash_root != self.computed_root:
            self._hash_under(self.computed_root)

    def emit(
        self,
        token_ids: list[int],
        ending: Ending | None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: list[float] | None = None,
    ) -> EngineOutput:
        """The output that says these tokens (appended before) and, perhaps, the end. Counts them as emitted."""
        is_first = self.num_emitted_tokens == 0 and bool(token_ids or pooled)
        output = EngineOutput(
            request_id=self.asked.request_id,
            attempt=self.asked.attempt,
            choice=self.asked.choice,
            first_index=self.answer_length,
            token_ids=token_ids,
            logprobs=logprobs,
            pooled=pooled,
        )
        self.num_emitted_tokens += len(token_ids)
        if is_first:
            output.num_cached_tokens = self.num_cached_tokens
            output.timings = self.milestones.split()
            output.prompt_logprobs = self.prompt_logprobs or None
        if ending is not None:
            self.status = ending.status
            output.is_leg_finished = True
            output.finish_reason = ending.finish_reason
            output.stop_reason = ending.stop_reason
            output.error_kind = ending.error_kind
            output.error_message = ending.error_message
            output.error_param = ending.error_param
        return output

    def _hash_under(self, root: BlockHash) -> None:
        self.hash_root = root
        self.block_hashes = full_block_hashes(root, self.token_ids, self.block_size)


def ending_after(request: Request, index: int, max_model_len: int) -> Ending | None:
    """Whether the newest known token, number ``index`` (from 0) of the answer, ends it.

    Either a stop token (never before ``min_tokens``), or a limit of length.
    """
    sampling = request.asked.sampling
    token = request.token_ids[-1]
    if index >= sampling.min_tokens:
        if token in sampling.stop_token_ids:
            return Ending(RequestStatus.FINISHED_STOPPED, stop_reason=token)
        if token in request.eos_token_ids and not sampling.ignore_eos:
            return Ending(RequestStatus.FINISHED_STOPPED)
    if _is_last(request, index, request.num_tokens, max_model_len):
        return Ending(RequestStatus.FINISHED_LENGTH_CAPPED)
    return None


def ends_with_first_token(request: Request, max_model_len: int) -> bool:
    """Whether the token that follows the prompt ends the answer, whatever it is: nobody goes on behind it."""
    return _is_last(request, request.asked.first_index, request.num_prompt_tokens + 1, max_model_len)


def _is_last(request: Request, index: int, num_tokens: int, max_model_len: int) -> bool:
    """Whether token number ``index`` of the answer, with which ``num_tokens`` are known, has none behind it."""
    return index + 1 >= request.asked.sampling.max_tokens or num_tokens >= max_model_len


def ending_tokens(request: Request, max_model_len: int) -> frozenset[int] | None:
    """Tokens that might end the answer as its next one; None where any might: by its length or grammar, or as its first."""
    is_last = _is_last(request, request.answer_length, request.num_tokens + 1, max_model_len)
    if is_last or request.structured_output_request or not request.is_decoding:
        return None
    return request.end_tokens


def ended_corrupted(request: Request, has_nans: bool) -> Ending:
    """What was computed of it is not numbers, or is missing."""
    if has_nans:
        what = "the hidden states hold NaN or infinity" if request.is_pooling else "the logits hold NaN"
    else:
        what = f"nothing was {'pooled' if request.is_pooling else 'sampled'} at the end of the known tokens"
    return ended_by_error(ErrorKind.INTERNAL, f"{what} after {request.num_tokens} tokens")


def why_impossible(request: Request, max_length: int, num_usable_blocks: int) -> str | None:
    """Why the request can never run in an engine of this size; None when it can."""
    num_prompt = request.num_prompt_tokens
    if request.is_pooling and num_prompt > max_length:
        return f"the prompt has {num_prompt} tokens; this engine takes {max_length} at most: shorten it"
    if num_prompt + 1 > max_length and not request.is_pooling:
        return (
            f"the prompt has {num_prompt} tokens; with at least one token of answer this engine takes "
            f"{max_length - 1} at most: shorten it"
        )
    num_tokens = num_prompt + 1 if request.is_receiving else num_prompt
    num_blocks = blocks_needed(num_tokens, request.block_size)
    if num_blocks > num_usable_blocks:
        return (
            f"the prompt of {num_prompt} tokens needs {num_blocks} KV blocks of {request.block_size} tokens, "
            f"the engine has {num_usable_blocks}: shorten it or raise kv_cache_bytes"
        )
    return None
