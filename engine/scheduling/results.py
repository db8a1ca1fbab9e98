"""The effect of a step, or of KV that has arrived, on a request: its tokens are sent, its choices separate, it finishes.

The KV of a prompt with several choices is computed, or received, once, and each choice continues from there. Full blocks are
shared, since no request writes them any more. The last one, if it is not full, is copied for each choice but the first
before the next forward pass, which writes it.
"""

from collections.abc import Callable, Sequence

from contract.errors import ErrorKind, TransferError
from contract.outputs import TokenLogprobs
from engine.connector import FirstToken, Received
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batch.drafting import Drafting
from engine.scheduling.blocks.block_copies import BlockCopies
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.blocks.lent_blocks import forget_heads
from engine.scheduling.live_requests import Limits, LiveRequests
from engine.scheduling.remote_kv import RemoteKV
from engine.scheduling.requests.finish import ABORTED, HANDED_OVER, Finish, RequestStatus
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.stopping import finish_after
from engine.scheduling.requests.token_logprobs import first_tokens, sampled_logprobs
from engine.scheduling.stats import Totals


def choices_of(request: Request) -> list[Request]:
    """Return the request, which continues as its first choice, and a fork for each other one."""
    return [request, *map(request.fork, request.engine_request.choices[1:])]


def _finish_of_dismissed(choice: Request, first: Request) -> Finish | None:
    return ABORTED if choice.engine_request.choice in first.dismissed else None


class Results:
    """Applies what was computed, or received, to the requests.

    block_copies: to be made before anything else is computed; not ordered yet. drafting: what learns from drafts, if any.
    """

    def __init__(
        self,
        live: LiveRequests,
        pools: CachePools,
        queues: BatchQueues,
        remote_kv: RemoteKV,
        totals: Totals,
        limits: Limits,
        clock: Callable[[], float],
        drafting: Drafting | None,
    ) -> None:
        self.block_copies = BlockCopies(pools)
        self._live = live
        self._pools = pools
        self._queues = queues
        self._remote_kv = remote_kv
        self._tiers = remote_kv.tiers
        self._totals = totals
        self._limits = limits
        self._clock = clock
        self._drafting = drafting

    def apply_received(self, request: Request) -> None:
        """Let a request continue whose KV has arrived, and was verified: its full blocks may be found from now on."""
        received = request.received
        assert received is not None, "nothing has arrived"
        try:
            tokens = check_first_tokens(received, request.engine_request.num_choices, self._limits.vocab_size)
        except TransferError as error:
            self._live.finish(request, Finish.by(error))
            return
        choices = choices_of(request)
        for choice, token in zip(choices, tokens, strict=True):
            choice.receive(received, token, self._clock())
        self._totals.num_received_tokens += request.num_prompt_tokens - request.num_cached_tokens
        self._index_computed(request)
        self._live.has_changes = True
        max_length = self._limits.max_length
        # The token is the sender's: this engine's first one, number ``first_index``, comes behind it.
        finishes = [finish_after(one, one.answer_length - 1, max_length) for one in choices]
        if finish := self._separate(choices, finishes):
            self._live.finish(request, finish)
        else:
            self._queues.arrived.add(request)

    def apply_step(self, request: Request, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Advance a request by the tokens that a step has computed of it."""
        num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(request.key, ()))
        num_tokens = scheduled.num_scheduled_tokens[request.key] - num_drafts
        row = output.req_id_to_index[request.key]
        sampled = output.sampled_token_ids[row]
        pooled = output.pooler_output[row] if output.pooler_output else None
        is_corrupt = (output.num_nans_in_logits or {}).get(request.key, 0) > 0
        # A token is due as soon as all known ones are computed; without one the answer would never go on.
        if is_corrupt or (not sampled and not pooled and num_tokens == request.num_missing_tokens):
            self._finish_corrupted(request, is_corrupt)
            return
        if (num_prompt_left := request.num_prompt_tokens - request.num_computed_tokens) > 0:
            self._totals.num_prefill_tokens += min(num_tokens, num_prompt_left)
            if num_prompt_left <= num_tokens:
                request.milestones.prefilled = self._clock()
        request.num_computed_tokens += num_tokens
        self._index_computed(request)
        if output.prompt_logprobs_dict:
            request.prompt_logprobs.extend(output.prompt_logprobs_dict.get(request.key))
        if pooled:
            self._live.finish(request, Finish(RequestStatus.FINISHED_STOPPED), pooled=pooled)
        if not sampled:
            return
        alternatives = request.engine_request.sampling.logprobs
        if request.is_sending or request.engine_request.num_choices > 1:
            self._apply_first_tokens(request, first_tokens(output, request.key, sampled[0], alternatives))
        else:
            if self._drafting is not None:
                self._drafting.learn(request, scheduled, output)
            num_kept, finish = self._append(request, sampled)
            logprobs = sampled_logprobs(output.logprobs, row, num_kept, alternatives)
            self._emit(request, sampled[:num_kept], logprobs, finish)

    def _append(self, request: Request, sampled: Sequence[int]) -> tuple[int, Finish | None]:
        """Extend the answer up to the token that ends it; return the number of tokens, and how the last one ends it.

        Each token but the last was computed in this step as well: the draft in its place was equal.
        """
        finish = None
        num_kept = 0
        while num_kept < len(sampled) and finish is None:
            request.append_token(sampled[num_kept])
            finish = finish_after(request, request.answer_length + num_kept, self._limits.max_length)
            num_kept += 1
        if num_kept > 1:
            request.num_computed_tokens += num_kept - 1
            self._index_computed(request)
        return num_kept, finish

    def _index_computed(self, request: Request) -> None:
        """Let other requests find all full blocks that are computed (law 1), and free what no later token sees."""
        num_full = request.num_computed_tokens // self._pools.block_size
        if num_full > request.num_indexed_blocks:
            start = request.num_indexed_blocks
            hashes = request.block_hashes[start:num_full]
            entered = self._pools.enter(request.key, start, hashes)
            if self._tiers is not None:
                self._tiers.offer(entered, hashes)
            request.num_indexed_blocks = num_full
            if request.num_until_whole:
                forget_heads(self._pools, request.key, request.num_prompt_tokens, request.num_cached_blocks)
        if self._pools.has_windows or self._pools.snapshots is not None:
            lengths = request.num_computed_tokens, request.num_prompt_tokens
            self._pools.note_computed(request.key, *lengths, request.block_hashes)

    def _apply_first_tokens(self, request: Request, sampled: list[FirstToken]) -> None:
        """Give each choice of a prompt its first token: they continue at another worker, or separate here."""
        choices = choices_of(request)
        for choice, token in zip(choices, sampled, strict=True):
            choice.append_token(token.token_id)
        max_length = self._limits.max_length
        finishes = [finish_after(one, one.answer_length, max_length) for one in choices]
        # If every choice ends with its first token, the receiver is not needed: the transfer is abandoned by their finish.
        if request.is_sending and None in finishes:
            self._remote_kv.sender.finish(request, sampled)
            finishes = [finish or HANDED_OVER for finish in finishes]
        finish = self._separate(choices, finishes, sampled)
        logprobs = sampled[0].logprobs
        self._emit(request, [sampled[0].token_id], [logprobs] if logprobs else None, finish)

    def _separate(
        self, choices: list[Request], finishes: list[Finish | None], sampled: Sequence[FirstToken] = ()
    ) -> Finish | None:
        """Separate the choices of a prompt, which have their first tokens; forks finish, or are queued.

        sampled: the first tokens, if they were sampled here, to be sent for the forks. The first choice, which has the
        prompt in its blocks, stands for itself from now on. Returns how that one finishes.
        """
        first, *forks = choices
        running = []
        for place, fork in enumerate(forks, 1):
            finish = finishes[place] or _finish_of_dismissed(fork, first)
            if sampled:
                own = sampled[place]
                logprobs = [own.logprobs] if own.logprobs else None
                self._live.outbox.add(fork, [own.token_id], finish, logprobs)
            elif finish:
                self._live.outbox.add(fork, [], finish)
            if finish is None:
                self._queue_fork(fork, first)
                running.append(fork)
        if forks:
            self._live.index.discard(first.key)
            first.engine_request = first.engine_request.of_choice(first.engine_request.choice)
            self._live.index.add(first.engine_request, first.dismissed)
        for fork in running:
            self._live.register(fork)
        return finishes[0] or _finish_of_dismissed(first, first)

    def _queue_fork(self, fork: Request, first: Request) -> None:
        """Allocate the fork's blocks and queue it. If too few are free, it is recomputed later, as after a preemption."""
        num_full, num_rest = divmod(fork.num_computed_tokens, self._pools.block_size)
        shared = self._pools.shared_by_fork(first.key, num_full)
        num_new = blocks_needed(fork.num_tokens, self._pools.block_size) - num_full
        if not self._pools.can_hold(num_new, shared, self._queues.promised_blocks(self._pools.first)):
            fork.lose_blocks()
            self._queues.waiting.add(fork)
            return
        self._pools.allocate(fork.key, num_new, shared)
        fork.num_indexed_blocks = first.num_indexed_blocks
        self.block_copies.fork(first.key, fork.key, num_full if num_rest else None)
        self._queues.arrived.add(fork)

    def _emit(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: Finish | None,
    ) -> None:
        if finish is None:
            self._live.outbox.add(request, token_ids, None, logprobs)
        else:
            self._live.finish(request, finish, token_ids, logprobs)

    def _finish_corrupted(self, request: Request, has_nans: bool) -> None:
        """Finish a request whose results are NaN, or missing: its KV is not reused."""
        if has_nans:
            what = "the hidden states hold NaN or infinity" if request.is_pooling else "the logits hold NaN"
        else:
            result = "pooled" if request.is_pooling else "sampled"
            what = f"nothing was {result} at the end of the known tokens"
        message = f"{what} after {request.num_tokens} tokens"
        self._pools.forget_content(request.key, request.block_hashes)
        if self._tiers is not None:
            self._tiers.forget(request.block_hashes)
        self._totals.num_corrupted += 1
        self._live.finish(request, Finish.with_error(ErrorKind.INTERNAL, message))


def check_first_tokens(received: Received, num_choices: int, vocab_size: int) -> list[int]:
    """Return the first token of each choice. Raises TransferError for what no correct sender sends."""
    tokens = [first.token_id for first in received.first_tokens]
    if len(tokens) != num_choices:
        raise TransferError(
            f"the transfer came with {len(tokens)} first tokens; the request needs {num_choices}"
        )
    if bad := [token for token in tokens if not 0 <= token < vocab_size]:
        raise TransferError(
            f"the transfer came with token id {bad[0]}; the vocabulary has 0..{vocab_size - 1}"
        )
    return tokens
