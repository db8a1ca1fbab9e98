"""Scenarios to explore: the workers, requests and blocks, the faults that may strike, and the rules."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from contract.block_hash import full_block_hashes
from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer
from contract.sampling import SamplingParams
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.remote_kv import TransferStages
from engine.settings import EngineSettings
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.control.sending import SendTransfers
from roles.table import STAGES

BLOCK_SIZE = 2
MODEL = "model"
VOCABULARY = 10_000


@dataclass(frozen=True)
class Rules:
    """Production's rules; a mutant has another class or a switch for one of them.

    checks_lease_twice: a read asks for its lease after its last byte as well. tells_attempts_apart: the router gives
    every attempt a number of its own. names_next_attempt: a cancel to the source of a move names the next attempt.
    leaves_unbound: a worker that drains leaves only when no leg is bound to it. reserves_first: room at the target of a
    move is reserved before its source is touched.
    """

    prefill_stages: TransferStages = STAGES
    decode_stages: TransferStages = STAGES
    send_transfers: Callable[..., SendTransfers] = SendTransfers
    fetch_transfers: Callable[..., FetchTransfers] = FetchTransfers
    state_slots: Callable[[int], StateSlots] = StateSlots
    checks_lease_twice: bool = True
    tells_attempts_apart: bool = True
    names_next_attempt: bool = True
    leaves_unbound: bool = True
    reserves_first: bool = True


@dataclass(frozen=True)
class Scenario:
    """One world to explore.

    prompts: length of each request's prompt in tokens; answers: of its answer. prefill_blocks, decode_blocks: usable
    blocks of each pool. is_one_sided: reads go by block id, are not counted and cannot be stopped (RDMA); else the
    sender counts its readers and a read can be stopped. checks_digests: every landed block's (off: pools where
    digests are only sampled, so the lease alone must keep them right). num_transports: over which blocks can be read, on
    every link. num_layer_groups: in how many parts a prompt's last blocks are made readable (1 or 2). faults: names of
    what may strike, at most ``num_faults`` times together. num_moves: how often each request may be moved, which begins on
    a prefill worker without a hand-over then. decode_credit: legs that each decode worker takes at a time. may_leave: the
    client may go at any moment, and that is no fault. window: of a second group of layers, in tokens; None: all layers see
    all tokens. window_blocks: usable blocks of each pool of that group. num_slots: of each worker for the states of a
    recurrent layer; 0: the model has none.
    """

    name: str
    prompts: tuple[int, ...] = (3,)
    answers: tuple[int, ...] = (2,)
    num_prefill: int = 1
    num_decode: int = 1
    prefill_blocks: int = 3
    decode_blocks: int = 3
    prefill_chunk: int = 2
    caches_prefixes: bool = False
    shares_prompt: bool = False
    is_one_sided: bool = False
    num_transports: int = 1
    num_layer_groups: int = 1
    window: int | None = None
    window_blocks: int = 3
    num_slots: int = 0
    checks_digests: bool = True
    faults: tuple[str, ...] = ()
    num_faults: int = 0
    max_replays: int = 2
    num_moves: int = 0
    decode_credit: int = 99
    may_leave: bool = False
    rules: Rules = field(default_factory=Rules)

    @property
    def is_planned(self) -> bool:
        """True if nothing fails: workers only drain, and no deadline may be needed."""
        return set(self.faults) == {"drain"}

    def token(self, number: int, position: int) -> int:
        """Return the token at this position of request ``number``: its prompt and answer are given (law 6)."""
        return (1 if self.shares_prompt and position < BLOCK_SIZE else 100 * (number + 1)) + position

    def tokens(self, number: int, length: int) -> list[int]:
        """Return the first ``length`` tokens of a request with its answer."""
        return [self.token(number, position) for position in range(length)]

    def settings(self, max_num_batched_tokens: int) -> EngineSettings:
        """Return settings of a small engine."""
        return EngineSettings(
            model=Path("none"),
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=self.caches_prefixes,
        )


@cache
def asked_of(
    scenario: Scenario,
    number: int,
    attempt: int,
    num_delivered: int,
    transfer: SendTransfer | ReceiveTransfer | None,
) -> EngineRequest:
    """Return the leg of an attempt after ``num_delivered`` tokens; equal calls get the same object."""
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=scenario.tokens(number, scenario.prompts[number] + num_delivered),
        sampling=SamplingParams(max_tokens=scenario.answers[number]),
        attempt=attempt,
        first_index=num_delivered + isinstance(transfer, ReceiveTransfer),
        transfer=transfer,
    )


@cache
def content_of_hashes(scenario: Scenario) -> dict[bytes, tuple[int, ...]]:
    """Return block hash → the tokens whose KV a block of that name must hold."""
    contents = {}
    for number, (prompt, answer) in enumerate(zip(scenario.prompts, scenario.answers, strict=True)):
        tokens = scenario.tokens(number, prompt + answer)
        root = asked_of(scenario, number, 0, 0, None).hash_root(MODEL)
        for index, block_hash in enumerate(full_block_hashes(root, tokens, BLOCK_SIZE)):
            contents[block_hash] = tuple(tokens[: (index + 1) * BLOCK_SIZE])
    return contents
