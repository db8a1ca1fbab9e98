"""The effect of a step, or of KV that has arrived, on a request: its tokens are sent, its choices separate, it finishes."""

from collections.abc import Callable, Sequence

from contract.errors import ErrorKind, TransferError
from contract.outputs import TokenLogprobs
from engine.connector import FirstToken
from engine.outputs import ModelRunnerOutput
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.remote.kv_receiver import check_first_tokens
from engine.scheduling.remote.remote_kv import RemoteKV
from engine.scheduling.requests.finish import HANDED_OVER, Finish
from engine.scheduling.requests.forking import Forking, choices_of
from engine.scheduling.requests.grammar_matching import advance_matcher
from engine.scheduling.requests.limits import Limits
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.requests.stopping import finish_after
from engine.scheduling.requests.token_logprobs import first_tokens, logprobs_in_row
from engine.scheduling.stats import Totals


class Results:
    """Applies what was computed, or received, to the requests."""

    def __init__(
        self,
        live: LiveRequests,
        pool: BlockPool,
        queues: BatchQueues,
        remote_kv: RemoteKV,
        totals: Totals,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.forking = Forking(pool, queues, live.index, live.outbox)
        self._live = live
        self._pool = pool
        self._queues = queues
        self._remote_kv = remote_kv
        self._totals = totals
        self._limits = limits
        self._clock = clock

    def apply_received(self, request: Request) -> None:
        """Let a request continue whose KV has arrived, and was verified: its full blocks may be found from now on."""
        received = request.received
        assert received is not None, "nothing has arrived"
        try:
            tokens = check_first_tokens(received, request.asked.num_choices, self._limits.vocab_size)
        except TransferError as error:
            self._live.finish(request, Finish.by(error))
            return
        choices = choices_of(request)
        for choice, token in zip(choices, tokens, strict=True):
            choice.receive(received, token, self._clock())
        self._totals.num_received_tokens += request.num_prompt_tokens - request.num_cached_tokens
        self._index_computed(request)
        self._live.has_changes = True
        finishes = [self._finish_after(one, one.answer_length - 1) for one in choices]
        if finish := self._separate(choices, finishes):
            self._live.finish(request, finish)
        else:
            self._queues.arrived.add(request)

    def apply_step(self, request: Request, num_tokens: int, output: ModelRunnerOutput) -> None:
        """Advance a request by the tokens that a step has computed of it."""
        row = output.req_id_to_index[request.key]
        sampled = output.sampled_token_ids[row]
        pooled = output.pooler_output[row] if output.pooler_output else None
        is_corrupt = (output.num_nans_in_logits or {}).get(request.key, 0) > 0
        if is_corrupt or (not sampled and not pooled and num_tokens == request.num_missing_tokens):
            self._finish_corrupted(request, is_corrupt)
            return
        if request.num_computed_tokens < request.num_prompt_tokens:
            self._count_prompt(request, num_tokens)
        request.num_computed_tokens += num_tokens
        self._index_computed(request)
        if output.prompt_logprobs_dict:
            request.prompt_logprobs.extend(output.prompt_logprobs_dict.get(request.key))
        if pooled:
            self._live.finish(request, Finish(RequestStatus.FINISHED_STOPPED), pooled=pooled)
        if not sampled:
            return
        alternatives = request.asked.sampling.logprobs
        if request.is_sending or request.asked.num_choices > 1:
            self._apply_first_tokens(request, first_tokens(output, request.key, sampled[0], alternatives))
        else:
            request.append_token(sampled[0])
            finish = self._finish_after(request, request.answer_length)
            self._emit(request, sampled[0], logprobs_in_row(output.logprobs, row, alternatives), finish)

    def _count_prompt(self, request: Request, num_tokens: int) -> None:
        num_prompt_left = request.num_prompt_tokens - request.num_computed_tokens
        self._totals.num_prefill_tokens += min(num_tokens, num_prompt_left)
        if num_prompt_left <= num_tokens:
            request.milestones.prefilled = self._clock()

    def _index_computed(self, request: Request) -> None:
        """Let other requests find all full blocks that are computed (law 1)."""
        num_full = request.num_computed_tokens // self._pool.block_size
        if num_full > request.num_indexed_blocks:
            start = request.num_indexed_blocks
            self._pool.enter(request.key, start, request.block_hashes[start:num_full])
            request.num_indexed_blocks = num_full

    def _apply_first_tokens(self, request: Request, sampled: list[FirstToken]) -> None:
        """Give each choice of a prompt its first token: they continue at another worker, or separate here."""
        choices = choices_of(request)
        for choice, token in zip(choices, sampled, strict=True):
            choice.append_token(token.token_id)
        finishes = [self._finish_after(one, one.answer_length) for one in choices]
        if request.is_sending and None in finishes:
            self._remote_kv.finish(request, sampled)
            finishes = [finish or HANDED_OVER for finish in finishes]
        finish = self._separate(choices, finishes, sampled)
        logprobs = sampled[0].logprobs
        self._emit(request, sampled[0].token_id, [logprobs] if logprobs else None, finish)

    def _separate(
        self, choices: list[Request], finishes: list[Finish | None], sampled: Sequence[FirstToken] = ()
    ) -> Finish | None:
        """Separate the choices of a prompt; return how the first one finishes."""
        finish, forks = self.forking.separate(choices, finishes, sampled)
        for fork in forks:
            self._live.register(fork)
        return finish

    def _emit(
        self, request: Request, token: int, logprobs: list[TokenLogprobs] | None, finish: Finish | None
    ) -> None:
        if finish is None:
            self._live.outbox.add(request, [token], None, logprobs)
        else:
            self._live.finish(request, finish, [token], logprobs)

    def _finish_after(self, request: Request, index: int) -> Finish | None:
        """Return how the newest token, number ``index`` of the answer, ends it. If it does not, advance its matcher."""
        finish = finish_after(request, index, self._limits.max_length)
        matcher = request.structured_output_request
        return finish if finish is not None or matcher is None else advance_matcher(request, matcher)

    def _finish_corrupted(self, request: Request, has_nans: bool) -> None:
        """Finish a request whose results are NaN, or missing: its KV is not reused."""
        if has_nans:
            what = "the hidden states hold NaN or infinity" if request.is_pooling else "the logits hold NaN"
        else:
            what = (
                f"nothing was {'pooled' if request.is_pooling else 'sampled'} at the end of the known tokens"
            )
        message = f"{what} after {request.num_tokens} tokens"
        self._pool.forget_content(request.key)
        self._totals.num_corrupted += 1
        self._live.finish(request, Finish.with_error(ErrorKind.INTERNAL, message))
