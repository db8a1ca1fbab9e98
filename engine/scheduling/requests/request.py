"""The scheduler's state of one request: its status, its tokens, and how many of them are computed."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from contract.block_hash import BlockHash
from contract.outputs import RequestTimings, TransferReport
from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer
from engine.connector import Received
from engine.grammar.matcher import GrammarMatcher
from engine.scheduling.blocks.hash_chain import HashChain
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.requests.token_logprobs import PromptLogprobEntries


@dataclass
class Milestones:
    """The times of a request's stages, in seconds of the scheduler's clock; None for a stage that it has not reached."""

    queued: float
    scheduled: float | None = None
    prefilled: float | None = None
    transfer: TransferReport = field(default_factory=TransferReport)

    def split(self) -> RequestTimings:
        """Return the durations between the milestones."""
        scheduled = self.queued if self.scheduled is None else self.scheduled
        return RequestTimings(
            queue_seconds=scheduled - self.queued,
            prefill_seconds=0.0 if self.prefilled is None else self.prefilled - scheduled,
            transfer=self.transfer,
        )


@dataclass(eq=False)
class Request:
    """One EngineRequest in the scheduler, which alone changes it.

    arrival_number: counts the scheduler's requests and their choices; no two have the same. expires: when it must have
    finished, on the scheduler's clock. dismissed: choices that were cancelled. is_fork: another choice has computed, or
    received, the prompt.

    token_ids: all known tokens: the prompt, then the answer's. num_computed_tokens: how many of them have their KV in
    this request's blocks. num_emitted_tokens: tokens that left this engine as output. structured_output_request: where
    the answer is in its grammar; None without a grammar, and while it is compiled. received: what came with the prompt's
    KV from another worker; set between its arrival and the request's first step only.
    """

    asked: EngineRequest
    token_ids: list[int]
    milestones: Milestones
    arrival_number: int
    block_size: int
    hashes: HashChain
    prompt_logprobs: PromptLogprobEntries
    expires: float
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_indexed_blocks: int = 0
    num_emitted_tokens: int = 0
    num_cached_tokens: int = 0
    is_known_to_runner: bool = False
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
        """Return the state of a request that has just arrived."""
        return cls(
            asked=asked,
            token_ids=list(asked.prompt_token_ids),
            milestones=Milestones(queued=now),
            arrival_number=arrival_number,
            block_size=block_size,
            hashes=HashChain(asked.hash_root(model_fingerprint), asked.prompt_token_ids, block_size),
            prompt_logprobs=PromptLogprobEntries.of(asked),
            expires=now + asked.deadline_seconds,
        )

    def fork(self, choice: int) -> "Request":
        """Return another choice of the same, computed prompt, which has no blocks of its own yet."""
        matcher = self.structured_output_request
        return replace(
            self,
            asked=self.asked.of_choice(choice),
            token_ids=list(self.token_ids),
            hashes=self.hashes.copy(),
            milestones=replace(self.milestones),
            arrival_number=self.arrival_number + choice,
            status=RequestStatus.WAITING,
            is_known_to_runner=False,
            is_fork=True,
            dismissed=set(),
            structured_output_request=matcher.fork() if matcher else None,
            received=None,
        )

    # What was asked for.

    @cached_property
    def key(self) -> str:
        """The engine's identifier of this choice of this attempt."""
        return self.asked.key

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end the answer, from its ``min_tokens`` on."""
        sampling = self.asked.sampling
        eos_token_ids = () if sampling.ignore_eos else self.eos_token_ids
        return frozenset(sampling.stop_token_ids) | frozenset(eos_token_ids)

    @property
    def client_index(self) -> int:
        """Index of the front end that sent the request, to which its outputs go."""
        return self.asked.client_index

    @property
    def priority(self) -> int:
        """Requests with a higher one run earlier."""
        return self.asked.priority

    @property
    def precedence(self) -> tuple[int, int]:
        """Sorts by priority, then arrival: a lower one is served earlier and preempted later."""
        return -self.priority, self.arrival_number

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens."""
        return self.asked.eos_token_ids

    @cached_property
    def is_sending(self) -> bool:
        """True for a prefill leg, which lends its KV to another worker and finishes after one token."""
        return isinstance(self.asked.transfer, SendTransfer)

    @property
    def is_receiving(self) -> bool:
        """True for a decode leg, whose prompt's KV comes from another worker."""
        return isinstance(self.asked.transfer, ReceiveTransfer)

    @property
    def is_pooling(self) -> bool:
        """True for a request for an embedding, which finishes when its prompt is computed."""
        return self.asked.pooling_params is not None

    # How far it is.

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.asked.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens whose KV is not computed yet; 1 for a request that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def answer_length(self) -> int:
        """Tokens of the whole answer so far, including those that other engines emitted."""
        return self.asked.first_index + self.num_emitted_tokens

    @property
    def is_decoding(self) -> bool:
        """True when only the newest token is not computed, and it is not the prompt's."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > len(self.asked.prompt_token_ids)

    @property
    def block_hashes(self) -> list[BlockHash]:
        """One hash for each full block of known tokens."""
        return self.hashes.blocks

    @property
    def reusable_hashes(self) -> list[BlockHash]:
        """Hashes of blocks that may come from the cache; the newest token is always computed, for its logits.

        Empty if every token of the prompt is needed: for its log probability, or for its part of a mean.
        """
        is_mean = self.asked.pooling_params and self.asked.pooling_params.kind == "mean"
        if self.prompt_logprobs.are_missing or is_mean:
            return []
        return self.block_hashes[: (self.num_tokens - 1) // self.block_size]

    # What changes.

    def append_token(self, token_id: int) -> None:
        """Extend the answer by one token."""
        self.token_ids.append(token_id)
        if len(self.token_ids) % self.block_size == 0:
            self.hashes.extend(self.token_ids)

    def hash_from(self, fingerprint: str) -> None:
        """Find and keep its blocks under other hashes: its KV differs from what this engine would compute (law 7)."""
        self.hashes.restart(self.token_ids, self.asked.hash_root(fingerprint))

    def find_computed(self, num_blocks: int, *, is_first: bool) -> None:
        """Record that the cache holds its first ``num_blocks`` blocks. is_first: report them to the client."""
        self.num_computed_tokens = num_blocks * self.block_size
        self.num_indexed_blocks = num_blocks
        if is_first:
            self.num_cached_tokens = self.num_computed_tokens

    def receive(self, received: Received, first_token: int, now: float) -> None:
        """Record that the prompt's KV has arrived and was verified; ``first_token`` was sampled by the sender."""
        self.num_computed_tokens = self.num_prompt_tokens
        self.append_token(first_token)
        self.milestones.queued = now
        self.milestones.transfer = received.report
        self.received = None

    def lose_blocks(self) -> None:
        """Record that its blocks were taken: everything is computed again, here, even if another worker computed it."""
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.num_indexed_blocks = 0
        self.prompt_logprobs.restart()
        self.hashes.restart(self.token_ids)
