"""What a step, or KV that has arrived, means for a request: its tokens go out, its choices part, its answer ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.errors import TransferError
from contract.outputs import TokenLogprobs
from engine.connector import FirstToken
from engine.outputs import ModelRunnerOutput
from engine.scheduling.batching import Batcher
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.ending import HANDED_OVER, Ending, RequestStatus, ended_by_error
from engine.scheduling.forking import Forking, choices_of
from engine.scheduling.grammars import Grammars
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.outbox import Outbox
from engine.scheduling.remote_kv import KVSender, first_tokens_of
from engine.scheduling.request import Request, ended_corrupted, ending_after
from engine.scheduling.stats import Totals
from engine.scheduling.token_logprobs import first_tokens, logprobs_in_row


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine. max_length: tokens that prompt and answer may have. vocab_size: of its model."""

    max_length: int
    vocab_size: int


class Results:
    """Applies what was computed, or received, to the requests."""

    def __init__(
        self,
        live: LiveRequests,
        pool: BlockPool,
        batcher: Batcher,
        sender: KVSender | None,
        grammars: Grammars,
        outbox: Outbox,
        totals: Totals,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.forking = Forking(pool, batcher, live.index, outbox)
        self._live = live
        self._pool = pool
        self._batcher = batcher
        self._sender = sender
        self._grammars = grammars
        self._outbox = outbox
        self._totals = totals
        self._limits = limits
        self._clock = clock

    def apply_received(self, request: Request) -> None:
        """Let a request go on whose KV has arrived, and was verified: its full blocks may be found from now on."""
        received = request.received
        assert received is not None, "nothing has arrived"
        try:
            tokens = first_tokens_of(received, request.asked.num_choices, self._limits.vocab_size)
        except TransferError as error:
            self._live.finish(request, ended_by_error(error.kind, error.message))
            return
        choices = choices_of(request)
        for choice, token in zip(choices, tokens, strict=True):
            choice.receive(received, token, self._clock())
        self._totals.num_received_tokens += request.num_prompt_tokens - request.num_cached_tokens
        self._batcher.index_computed(request)
        self._live.has_news = True
        endings = [self._ending_after(one, one.answer_length - 1) for one in choices]
        if ending := self._part(choices, endings):
            self._live.finish(request, ending)
        else:
            self._batcher.arrived.add(request)

    def apply_step(self, request: Request, num_tokens: int, output: ModelRunnerOutput) -> None:
        """Advance a request by the tokens that a step has computed of it."""
        row = output.req_id_to_index[request.key]
        sampled = output.sampled_token_ids[row]
        pooled = output.pooler_output[row] if output.pooler_output else None
        is_corrupt = (output.num_nans_in_logits or {}).get(request.key, 0) > 0
        if is_corrupt or (not sampled and not pooled and num_tokens == request.num_missing_tokens):
            self._end_corrupted(request, is_corrupt)
            return
        self._count(request, num_tokens)
        request.num_computed_tokens += num_tokens
        self._batcher.index_computed(request)
        request.take_prompt_logprobs(output.prompt_logprobs_dict.get(request.key))
        if pooled:
            self._live.finish(request, Ending(RequestStatus.FINISHED_STOPPED), pooled=pooled)
        if not sampled:
            return
        alternatives = request.asked.sampling.logprobs
        if request.is_sending or request.asked.num_choices > 1:
            self._apply_first_tokens(request, first_tokens(output, request.key, sampled[0], alternatives))
        else:
            request.append_token(sampled[0])
            ending = self._ending_after(request, request.answer_length)
            self._emit(request, sampled[0], logprobs_in_row(output.logprobs, row, alternatives), ending)

    def _count(self, request: Request, num_tokens: int) -> None:
        num_prompt_left = request.num_prompt_tokens - request.num_computed_tokens
        if num_prompt_left > 0:
            self._totals.num_prefill_tokens += min(num_tokens, num_prompt_left)
        if 0 < num_prompt_left <= num_tokens:
            request.milestones.prefilled = self._clock()

    def _apply_first_tokens(self, request: Request, drawn: list[FirstToken]) -> None:
        """Give each choice of a prompt its first token: they go on at another worker, or part here."""
        choices = choices_of(request)
        for choice, token in zip(choices, drawn, strict=True):
            choice.append_token(token.token_id)
        endings = [self._ending_after(one, one.answer_length) for one in choices]
        if self._sender and request.is_sending and None in endings:
            self._sender.finish(request, drawn)
            endings = [ending or HANDED_OVER for ending in endings]
        ending = self._part(choices, endings, drawn)
        logprobs = drawn[0].logprobs
        self._emit(request, drawn[0].token_id, [logprobs] if logprobs else None, ending)

    def _part(
        self, choices: list[Request], endings: list[Ending | None], drawn: Sequence[FirstToken] = ()
    ) -> Ending | None:
        ending, forks = self.forking.part(choices, endings, drawn)
        for fork in forks:
            self._live.register(fork)
        return ending

    def _emit(
        self, request: Request, token: int, logprobs: list[TokenLogprobs] | None, ending: Ending | None
    ) -> None:
        if ending is None:
            self._outbox.tokens(request, [token], None, logprobs)
        else:
            self._live.finish(request, ending, [token], logprobs)

    def _ending_after(self, request: Request, index: int) -> Ending | None:
        """Return how the newest token, number ``index`` of the answer, ends it; if it does not, its grammar follows."""
        return ending_after(request, index, self._limits.max_length) or self._grammars.follow(request)

    def _end_corrupted(self, request: Request, has_nans: bool) -> None:
        """End a request of which NaN was computed, or nothing where there should be something: its KV is not reused."""
        self._pool.forget_content(request.key)
        self._totals.num_corrupted += 1
        self._live.finish(request, ended_corrupted(request, has_nans))
