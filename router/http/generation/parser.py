"""The bodies of /v1/chat/completions and /v1/completions, parsed into exchanges."""

import time

from msgspec import structs

from contract.errors import InvalidRequestError
from contract.sampling import MAX_LOGPROBS
from router.http.bodies.body import Body
from router.http.exchange import AnswerOptions, Exchange, Origin
from router.http.fields.chat import CHAT_FIELDS, chat_of, forced_calls
from router.http.fields.offered_tools import read_tools
from router.http.fields.sampling import is_streamed, prompts_of, read_shared_fields
from router.http.fields.unsupported import STREAM_NEUTRAL, reject_unless_neutral, reject_unsupported
from router.http.generation.chat_formatter import ChatFormatter
from router.http.generation.completion_formatter import CompletionFormatter, PromptView, without_answer
from router.http.schema.completion import MAX_LEGACY_LOGPROBS
from router.http.schema.notation import INT31
from router.intake.model_source import ModelSource
from router.intake.request import COMPLETION_MAX_TOKENS, GenerationRequest, for_prompts


class GenerationParser:
    """Parses chats and text completions for the model of ``models``. max_answers: most answers of one request."""

    def __init__(self, models: ModelSource, max_answers: int) -> None:
        self._models = models
        self._max_answers = max_answers

    def chat(self, body: Body, origin: Origin) -> Exchange:
        """Parse the body of a chat. Raises KvbatonError."""
        reject_unsupported(body, CHAT_FIELDS)
        longest = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        offered = read_tools(body)
        chat = chat_of(body, offered)
        request = GenerationRequest(
            request_id=origin.request_id,
            prompt=chat,
            max_tokens=body.integer_within(longest, 1, INT31),
            logprobs=_chat_logprobs(body),
            tenant=origin.tenant,
            arrival=origin.arrival,
            **forced_calls(chat, read_shared_fields(body)),
        )
        options = self._options([request], body)
        names_call = chat.tool_choice.name is not None
        formatter = ChatFormatter(
            options, self._models.card().tokenizer, names_call=names_call, custom=offered.custom
        )
        return Exchange(requests=[request], options=options, formatter=formatter, left_out=offered.left_out)

    def completion(self, body: Body, origin: Origin) -> Exchange:
        """Parse the body of a text completion. Raises KvbatonError."""
        reject_unsupported(body)
        first, *others = prompts_of(body.get("prompt"), self._max_answers, param="prompt")
        hides_answer = without_answer(body)
        request = GenerationRequest(
            request_id=origin.request_id,
            prompt=first,
            # no engine computes an answer without a token; the view hides it
            max_tokens=1 if hides_answer else body.integer_within("max_tokens", 1, INT31),
            default_max_tokens=COMPLETION_MAX_TOKENS,
            logprobs=body.integer_within("logprobs", 0, MAX_LEGACY_LOGPROBS),
            tenant=origin.tenant,
            arrival=origin.arrival,
            **read_shared_fields(body),
        )
        is_echoed = body.flag("echo")
        if is_echoed and request.prompt_logprobs is None:
            # an echoed prompt is shown like the answer, with the same log probabilities
            request = structs.replace(request, prompt_logprobs=request.logprobs)
        requests = for_prompts(request, others)
        options = self._options(requests, body)
        view = PromptView(
            [one.prompt if isinstance(one.prompt, str) else None for one in requests],
            options.num_chosen,
            is_shown=is_echoed,
            hides_answer=hides_answer,
            has_offsets=request.logprobs is not None,
        )
        formatter = CompletionFormatter(options, self._models.card().tokenizer, view)
        return Exchange(requests=requests, options=options, formatter=formatter)

    def _options(self, requests: list[GenerationRequest], body: Body) -> AnswerOptions:
        stream = is_streamed(body)
        include_usage = stream and _includes_usage(body.object("stream_options"))
        first = requests[0]
        num_choices = len(requests) * first.num_choices
        # all of them wait in the queue at once, so a request with more could never be admitted
        if num_choices > self._max_answers:
            raise InvalidRequestError(
                f"the request asks for {num_choices} answers; the limit is {self._max_answers}", param="n"
            )
        return AnswerOptions(
            request_id=first.request_id,
            num_choices=num_choices,
            model=first.model or self._models.card().name,
            created=int(time.time()),
            stream=stream,
            include_usage=include_usage,
            logprobs=first.logprobs is not None,
            return_token_ids=body.flag("return_token_ids"),
            timings=body.flag("timings"),
            num_chosen=body.get("n") or 1,
            prompt_logprobs=body.get("prompt_logprobs") is not None,
        )


def _includes_usage(stream_options: Body) -> bool:
    for name, neutral in STREAM_NEUTRAL.items():
        reject_unless_neutral(f"stream_options.{name}", stream_options.fields.get(name), neutral)
    return stream_options.flag("include_usage")


def _chat_logprobs(body: Body) -> int | None:
    top = body.integer_within("top_logprobs", 0, MAX_LOGPROBS)
    if body.flag("logprobs"):
        return top or 0
    if top:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None
