"""The scheduler's state of one request: its status, its tokens, how many of them are computed, and its blocks' hashes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from contract.block_hash import BlockHash, block_hash, full_block_hashes
from contract.outputs import RequestTimings, TransferReport
from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer
from engine.connector import Received
from engine.grammar.matcher import GrammarMatcher
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.requests.token_logprobs import PromptLogprobEntries

# Weight of the newest draft in a request's share of right ones.
_NEWEST_DRAFT = 0.15


class HashChain:
    """Hashes of the full blocks of a growing list of tokens; each depends on all tokens before its end.

    blocks: one hash for each full block. computed_root: what the chain starts from for KV that this engine computes;
    it starts from another root while the request has KV of another kind (``restart``).
    """

    def __init__(self, computed_root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
        self.blocks = full_block_hashes(computed_root, token_ids, block_size)
        self._computed_root = computed_root
        self._root = computed_root
        self._block_size = block_size

    @property
    def is_computed_here(self) -> bool:
        """True if the hashes are those of KV that this engine computes, or could have computed."""
        return self._root == self._computed_root

    def copy(self) -> "HashChain":
        """Return a chain that grows by itself from here."""
        twin = HashChain(self._computed_root, (), self._block_size)
        twin.blocks = list(self.blocks)
        twin._root = self._root
        return twin

    def text_hash(self, token_ids: Sequence[int], num_tokens: int) -> BlockHash:
        """Return the hash of the last block of the first ``num_tokens``, which may be partly filled."""
        num_full = num_tokens // self._block_size
        last = self.blocks[num_full - 1] if num_full else self._root
        rest = token_ids[num_full * self._block_size : num_tokens]
        return block_hash(last, rest) if rest else last

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the hash of the last block, which the newest token has filled. token_ids: all known tokens."""
        parent = self.blocks[-1] if self.blocks else self._root
        self.blocks.append(block_hash(parent, token_ids[-self._block_size :]))

    def restart(self, token_ids: Sequence[int], root: BlockHash | None = None) -> None:
        """Hash all blocks again from another root. root: None for KV that this engine computes."""
        root = root or self._computed_root
        if root != self._root:
            self._root = root
            self.blocks = full_block_hashes(root, token_ids, self._block_size)


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


@dataclass
class Drafts:
    """Guesses of a request's coming tokens.

    token_ids: those behind the newest token, which no step has computed yet. acceptance: the moving share of its drafts that
    were right, of those before which no other was wrong; None before its first step. num_misses: requests for drafts in a
    row for which nothing was found. next_comparison: the length of the answer at which drafts are compared next.
    """

    token_ids: list[int] = field(default_factory=list)
    acceptance: float | None = None
    num_misses: int = 0
    next_comparison: int = 0

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Record that of the drafts in a step, or of those that were compared, the first ``num_accepted`` were right."""
        acceptance = self.acceptance or 0.0
        for place in range(min(num_accepted + 1, num_drafts)):
            acceptance += _NEWEST_DRAFT * ((place < num_accepted) - acceptance)
        self.acceptance = acceptance

    def propose(self, token_ids: list[int]) -> None:
        """Keep what the runner has proposed, as it was requested."""
        self.token_ids = token_ids
        self.num_misses = 0 if token_ids else self.num_misses + 1


@dataclass(eq=False)
class Request:
    """One EngineRequest in the scheduler, which alone changes it.

    arrival_number: counts the scheduler's requests and their choices; no two have the same. expires: when it must have
    finished, on the scheduler's clock. dismissed: choices that were cancelled. is_fork: another choice has computed, or
    received, the prompt.

    token_ids: all known tokens: the prompt, then the answer's. num_computed_tokens: how many of them have their KV in
    this request's blocks. answer_length: tokens of the whole answer that were emitted, those by other engines included.
    structured_output_request: where the answer is in its grammar; None without a grammar, and while it is compiled.
    received: what came with the prompt's KV from another worker; set between its arrival and the request's first step only.
    num_swapped_tokens: how many of its tokens its states had absorbed when it was preempted, if KV tiers may have these.
    num_until_whole: with fewer tokens, a window sees a block that arrived without its first tokens.
    drafts: guesses of its coming tokens, in an engine that speculates.
    """

    engine_request: EngineRequest
    token_ids: list[int]
    milestones: Milestones
    arrival_number: int
    block_size: int
    hashes: HashChain
    prompt_logprobs: PromptLogprobEntries
    expires: float
    num_prompt_tokens: int
    answer_length: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_indexed_blocks: int = 0
    num_cached_tokens: int = 0
    is_known_to_runner: bool = False
    is_fork: bool = False
    dismissed: set[int] = field(default_factory=set)
    structured_output_request: GrammarMatcher | None = None
    received: Received | None = None
    num_swapped_tokens: int = 0
    num_until_whole: int = 0
    drafts: Drafts = field(default_factory=Drafts)

    @classmethod
    def from_engine_request(
        cls,
        engine_request: EngineRequest,
        model_fingerprint: str,
        block_size: int,
        *,
        now: float = 0.0,
        arrival_number: int = 0,
    ) -> "Request":
        """Return the state of a request that has just arrived."""
        return cls(
            engine_request=engine_request,
            token_ids=list(engine_request.prompt_token_ids),
            milestones=Milestones(queued=now),
            arrival_number=arrival_number,
            block_size=block_size,
            hashes=HashChain(
                engine_request.hash_root(model_fingerprint), engine_request.prompt_token_ids, block_size
            ),
            prompt_logprobs=PromptLogprobEntries.of(engine_request),
            expires=now + engine_request.deadline_seconds,
            num_prompt_tokens=len(engine_request.prompt_token_ids),
            answer_length=engine_request.first_index,
        )

    def fork(self, choice: int) -> "Request":
        """Return another choice of the same, computed prompt, which has no blocks of its own yet."""
        matcher = self.structured_output_request
        return replace(
            self,
            engine_request=self.engine_request.of_choice(choice),
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
            drafts=Drafts(),
        )

    # What was asked for.

    @cached_property
    def key(self) -> str:
        """The engine's identifier of this choice of this attempt."""
        return self.engine_request.key

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end the answer, from its ``min_tokens`` on."""
        sampling = self.engine_request.sampling
        eos_token_ids = () if sampling.ignore_eos else self.eos_token_ids
        return frozenset(sampling.stop_token_ids) | frozenset(eos_token_ids)

    @property
    def precedence(self) -> tuple[int, int]:
        """Sorts by priority, then arrival: a lower one is served earlier and preempted later."""
        return -self.engine_request.priority, self.arrival_number

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens."""
        return self.engine_request.eos_token_ids

    @cached_property
    def is_sending(self) -> bool:
        """True for a prefill leg, which lends its KV to another worker and finishes after one token."""
        return isinstance(self.engine_request.transfer, SendTransfer)

    @property
    def is_receiving(self) -> bool:
        """True for a decode leg, whose prompt's KV comes from another worker."""
        return isinstance(self.engine_request.transfer, ReceiveTransfer)

    @property
    def is_pooling(self) -> bool:
        """True for a request for an embedding, which finishes when its prompt is computed."""
        return self.engine_request.pooling_params is not None

    # How far it is.

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self.token_ids)

    @property
    def num_cached_blocks(self) -> int:
        """Number of full blocks that the caches had of it."""
        return self.num_cached_tokens // self.block_size

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens whose KV is not computed yet; 1 for a request that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """True when only the newest token is not computed, and it is not the prompt's."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    @property
    def block_hashes(self) -> list[BlockHash]:
        """One hash for each full block of known tokens."""
        return self.hashes.blocks

    @property
    def reusable_hashes(self) -> list[BlockHash]:
        """Hashes of blocks that may come from the cache.

        Empty if every token of the prompt is needed: for its log probability, or for its part of an embedding.
        """
        pooling = self.engine_request.pooling_params
        if self.prompt_logprobs.are_missing or (pooling and pooling.is_over_all_tokens):
            return []
        # Without the newest token: it is computed even if its block is cached, for its logits.
        return self.block_hashes[: (self.num_tokens - 1) // self.block_size]

    # What changes.

    def append_token(self, token_id: int) -> None:
        """Extend the answer by one token."""
        self.token_ids.append(token_id)
        if len(self.token_ids) % self.block_size == 0:  # only full blocks have hashes
            self.hashes.extend(self.token_ids)

    def hash_from(self, fingerprint: str) -> None:
        """Find and keep its blocks under other hashes: its KV differs from what this engine would compute (law 7)."""
        self.hashes.restart(self.token_ids, self.engine_request.hash_root(fingerprint))

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
        self.num_until_whole = 0
        self.drafts.token_ids = []
        self.prompt_logprobs.restart()
        self.hashes.restart(self.token_ids)  # as KV of this engine, even if it came from another one
