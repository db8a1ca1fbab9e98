"""A request of an ``Engine`` or ``AsyncLLM``: the engine's outputs become the answers that its caller reads."""

import time

from contract.errors import InvalidRequestError, KvbatonError, UnsupportedFieldError, error_from_kind
from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.info import EngineInfo
from kvbaton.outputs import AnswerSoFar, RequestOutput, prompt_logprobs
from kvbaton.requests import PromptType, named, parse_prompt
from kvbaton.sampling import SamplingParams
from kvbaton.service import NO_TIMEOUT_SECONDS
from router.answers.answer import Answer, Delta, Prompt
from router.answers.timings import Stopwatch, Timings
from router.attempts.leg_outcome import LegReport
from router.intake.limits import TenantRules, check_limits
from router.intake.prepared_request import PreparedRequest, prepare
from router.intake.request import GenerationRequest, tokenize
from router.tokens.delivery import TokenBatch, tokens_of
from text.model_card import ModelCard
from text.stop import StopAutomaton


class RunningChoice:
    """One answer to a prompt, so far. first: its first delta."""

    def __init__(self, request: PreparedRequest, card: ModelCard) -> None:
        self._request = request
        self._answer = Answer(request, card)
        self._stopwatch = Stopwatch(request.arrival)
        self._stopwatch.on_queued(now := time.monotonic())
        self._stopwatch.on_bound(now)
        self.report = LegReport()
        self.so_far = AnswerSoFar(request.choice, card.tokenizer)
        self.timings = self._stopwatch.split(now)
        self.first: Delta | None = None

    @property
    def is_finished(self) -> bool:
        """True once it is complete."""
        return self._answer.is_finished

    def on_output(self, output: EngineOutput) -> bool:
        """Add an output of the engine; return whether the answer is complete though the engine continues it.

        That is the work of a stop string. Raises the error with which the engine ends the request.
        """
        if output.error_kind is not None:
            raise error_from_kind(output.error_kind, output.error_message or "", output.error_param)
        now = time.monotonic()
        self.report.add(output, has_transfer=False)
        tokens = tokens_of(output)
        end = output.end if output.is_leg_finished else (None, None)
        delta = self._answer.push(TokenBatch(tokens, *end))
        self._stopwatch.on_tokens(output.first_index, len(tokens), now)
        self._stopwatch.engine_queue_seconds = self.report.queue_seconds
        self._stopwatch.prefill_seconds = self.report.prefill_seconds
        self.timings = self._stopwatch.split(now)
        if self.first is None:
            delta.prompt = Prompt(self._request.prompt_token_ids, self.report.prompt_logprobs)
            self.first = delta
        self.so_far.add(delta)
        return self.is_finished and not output.is_leg_finished


class RunningRequest:
    """A prompt and its answers so far. engine_request: what the engine gets, under a name that no other request has had."""

    def __init__(
        self, name: str, request: PreparedRequest, num_choices: int, text: str | None, card: ModelCard
    ) -> None:
        self.engine_request = EngineRequest(
            request_id=name,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            eos_token_ids=request.eos_token_ids,
            num_choices=num_choices,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline_seconds=request.deadline - request.arrival,
        )
        self._request_id = request.request_id
        self._text = text
        self._tokenizer = card.tokenizer
        self._choices = [RunningChoice(request.of_choice(choice), card) for choice in range(num_choices)]

    @property
    def is_finished(self) -> bool:
        """True once all answers are complete."""
        return all(choice.is_finished for choice in self._choices)

    def on_output(self, output: EngineOutput) -> bool:
        """Add an output to the choice that it is for; see ``RunningChoice.on_output``. An error names the request."""
        choice = self._choices[output.choice]
        if choice.is_finished:
            return False
        try:
            return choice.on_output(output)
        except KvbatonError as error:
            raise named(error, f"request {self._request_id}: ") from error

    def output(self) -> RequestOutput:
        """Return the answers until now."""
        timings: list[Timings] = [choice.timings for choice in self._choices]
        first = self._choices[0]
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._text,
            prompt_token_ids=list(self.engine_request.prompt_token_ids),
            outputs=[choice.so_far.completion() for choice in self._choices],
            metrics=max(timings, key=lambda one: one.end_to_end),
            num_cached_tokens=first.report.num_cached_tokens,
            finished=self.is_finished,
            prompt_logprobs=prompt_logprobs([first.first] if first.first else [], self._tokenizer),
        )


def check_request(
    request_id: str,
    name: str,
    prompt: PromptType,
    sampling_params: SamplingParams | None,
    priority: int,
    card: ModelCard,
    info: EngineInfo,
) -> RunningRequest:
    """Check a request as a router does. Raises InvalidRequestError, which names the request.

    name: the engine's name for it.
    """
    try:
        given = parse_prompt(prompt, "prompt")
        params = SamplingParams() if sampling_params is None else sampling_params
        request = params.request(request_id, given.content, priority=priority, **given.others)
        prepared = _prepare(request, card, info)
    except InvalidRequestError as error:
        raise named(error, f"request {request_id}: ") from error
    text = given.content if isinstance(given.content, str) else None
    return RunningRequest(name, prepared, len(request.choices), text, card)


def _prepare(request: GenerationRequest, card: ModelCard, info: EngineInfo) -> PreparedRequest:
    check_limits(request)
    if not info.has_head:
        raise UnsupportedFieldError(
            f"the model {card.name} has no output head: it gives embeddings only", param="model"
        )
    token_ids = tokenize(request, card, info.max_model_len)
    stop = StopAutomaton(request.stop)
    return TenantRules().apply(
        prepare(request, token_ids, card, info.max_model_len, NO_TIMEOUT_SECONDS, stop)
    )
