"""The way of a request through the router, from its arrival to its end.

1. **Admit.** The tracker admits the request, or the client receives an error and may try again later.
2. **Prepare.** Chat template and tokenizer make token ids. Defaults are filled in, the seed is drawn, ranges and the model's
   length are checked. From here on everything but the answer is token ids.
3. **Wait.** The request waits in the router's admission queue until a prefill and a decode worker (or one that is both) have
   room. Their credit is reserved for it.
4. **Begin.** An attempt begins on these workers: the prefill leg and the decode leg start at the same time, and the workers
   hand over the KV without the router. Several answers to one prompt begin together; after the first token each one is
   independent.
5. **Stream.** The first token comes from the prefill worker at once, all others from the decode worker, each exactly once
   and in order. Each batch of tokens becomes a delta: detokenized, end tokens hidden, cut at a stop string, and in chats
   separated into content, reasoning and tool calls.
6. **Retry.** When a worker dies or a hand-over fails, the request run returns to 3 with the prompt and the tokens that were
   delivered. The client sees a pause.
7. **End.** The end of the answer, a stop string, a cancel, the deadline and an error that no attempt cures all end the run's
   block, which cancels the request on every worker that may still hold it, and then the tracker's block, which counts the
   outcome.

An embedding takes the same way with one leg, on a worker that computes prompts, and arrives in one piece. A client that
disconnects cancels the task, or ends the block: that is step 7, from any other step.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from contract.outputs import FinishReason
from router.answers.answer import Answer, Delta, DeltaSink, Prompt, Usage, merge_streams
from router.attempts.request_run import OpenAnswers, RequestRun, RequestRuns
from router.attempts.request_tracker import RequestTracker
from router.intake.limits import check_repeated
from router.intake.model_source import ModelSource
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.intake.request_preparer import RequestPreparer
from router.intake.round_robin import RoundRobin
from router.tokens.delivery import TokenBatch
from router.tokens.inbox import Consume
from text.model_card import ModelCard

_MANY_TOKENS = 8
"""Tokens of a batch up to which its JSON is so small that a connection takes it at once."""


class Pipeline:
    """Carries every request of HTTP and gRPC from its arrival to its end."""

    def __init__(
        self, models: ModelSource, preparer: RequestPreparer, tracker: RequestTracker, runs: RequestRuns
    ) -> None:
        self.preparer = preparer
        self._models = models
        self._tracker = tracker
        self._runs = runs
        self._rounds = RoundRobin()

    @asynccontextmanager
    async def generate(
        self, *requests: GenerationRequest, sink: DeltaSink | None = None
    ) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """Yield a stream of the deltas of all answers as they are computed. ``index`` is the answer that a delta belongs to.

        Every prompt has ``num_choices`` answers, which are numbered after those of the prompts before it. The last delta of
        each answer has ``finish_reason``, ``usage`` (a prompt counts for its first answer only) and ``timings``. All prompts
        are admitted and checked before one is sent. Leave the block or cancel its task to end the answers early. Raises
        KvbatonError, also while the stream is read. sink: gets those deltas of a single answer that it has room for while
        the stream's reader waits; the stream yields the others.
        """
        check_repeated(requests)
        with OpenAnswers(self._tracker, self._runs) as answers:
            card = await self._open(answers, requests)
            sink = sink if len(answers.runs) == 1 else None
            deltas = merge_streams([_answer(run, card, sink) for run in answers.runs])
            try:
                yield deltas
            finally:
                await deltas.aclose()

    async def embed(self, *requests: EmbeddingRequest) -> list[Delta]:
        """Return the embedding of each prompt, in order, with ``usage`` and ``timings``; all of them or none.

        Cancel its task to end it early. Raises KvbatonError.
        """
        with OpenAnswers(self._tracker, self._runs) as answers:
            await self._open(answers, requests)
            streams = [_embedding(run) for run in answers.runs]
            async with aclosing(merge_streams(streams)) as deltas:
                found = [delta async for delta in deltas]
        return sorted(found, key=lambda delta: delta.index)

    async def _open(
        self, answers: OpenAnswers, requests: Sequence[GenerationRequest | EmbeddingRequest]
    ) -> ModelCard:
        """Admit and prepare the prompts of one client's request, and open a run for each answer. Return their model."""
        first = requests[0]
        num_answers = sum([len(request.choices) for request in requests])
        await self._models.wait_settled()
        # A burst of one client takes turns with the requests of the others, whose tokens it would delay.
        await self._rounds.wait_turn(first.tenant)
        # For all answers together, so that none is admitted if there is no room for the last one.
        self._tracker.check_admission(first, num_answers)
        await answers.admit(requests)
        card = self.preparer.card_for(first)
        await answers.open_runs(await self.preparer.prepare(requests, card), first.tenant)
        return card


async def _answer(run: RequestRun, card: ModelCard, sink: DeltaSink | None) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of one answer that ``sink`` does not get.

    ``run.next`` waits for workers, begins attempts, and retries.
    """
    answer = Answer(run.request, card)
    consume = _write_to(sink, run, answer) if sink and answer.ends_with_tokens else None
    while not answer.is_finished:
        delta = _delta(run, answer, await run.next(consume))
        if delta.finish_reason:
            run.close()  # a stop string ends the answer before its workers do
            usage = _usage(run, answer.num_tokens, answer.num_reasoning_tokens)
            run.tracked.finish(delta, delta.finish_reason, usage, run.report)
        yield delta


def _write_to(sink: DeltaSink, run: RequestRun, answer: Answer) -> Consume[TokenBatch]:
    """Return a function that puts the delta of a batch into a sink, unless it is the last one or the sink has no room."""

    def consume(batch: TokenBatch) -> bool:
        if batch.finish_reason or len(batch.tokens) > _MANY_TOKENS or not sink.has_room:
            return False
        sink.put(_delta(run, answer, batch))
        return True

    return consume


def _delta(run: RequestRun, answer: Answer, batch: TokenBatch) -> Delta:
    """Return the delta of tokens that have just arrived."""
    is_first = answer.num_tokens == 0
    delta = answer.push(batch)
    if is_first:
        delta.prompt = Prompt(run.request.prompt_token_ids, run.report.prompt_logprobs)
    run.tracked.on_delta(delta)
    return delta


async def _embedding(run: RequestRun) -> AsyncGenerator[Delta, None]:
    """Yield the one delta of an embedding."""
    batch = await run.next()
    run.close()
    delta = Delta(finish_reason=batch.finish_reason, embedding=batch.embedding)
    run.tracked.finish(delta, FinishReason.STOP, _usage(run), run.report)
    yield delta


def _usage(run: RequestRun, num_tokens: int = 0, num_reasoning_tokens: int = 0) -> Usage:
    """Return the usage of one answer. A prompt with several answers counts for the first one."""
    has_prompt = run.request.choice == 0
    return Usage(
        num_prompt_tokens=len(run.request.prompt_token_ids) if has_prompt else 0,
        num_completion_tokens=num_tokens,
        num_cached_tokens=run.report.num_cached_tokens if has_prompt else 0,
        num_reasoning_tokens=num_reasoning_tokens,
    )
