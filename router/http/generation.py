"""The bodies of /v1/chat/completions and /v1/completions, read into exchanges."""

import time
from dataclasses import replace

from contract.errors import InvalidRequestError
from contract.sampling import MAX_LOGPROBS
from router.http.body import Body
from router.http.chat_fields import CHAT_FIELDS, chat_of, forced_calls
from router.http.echo import prompt_view, without_answer
from router.http.exchange import Exchange, Origin
from router.http.fields import choice_counts, refuse_unserved, shared_fields
from router.http.prompts import prompts_of
from router.http.schema import MAX_LEGACY_LOGPROBS
from router.http.shapes import AnswerOptions, ChatShape, CompletionShape
from router.model_source import ModelSource
from router.request import COMPLETION_MAX_TOKENS, GenerationRequest, for_prompts


class GenerationBodies:
    """Owns nothing. max_answers: of one request."""

    def __init__(self, models: ModelSource, max_answers: int) -> None:
        self._models = models
        self._max_answers = max_answers

    def chat(self, body: Body, origin: Origin) -> Exchange:
        """Read the body of a chat. Raises KvbatonError."""
        refuse_unserved(body, CHAT_FIELDS)
        longest = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        chat = chat_of(body)
        asked = GenerationRequest(
            request_id=origin.request_id,
            prompt=chat,
            max_tokens=body.integer(longest),
            logprobs=_chat_logprobs(body),
            tenant=origin.tenant,
            arrival=origin.arrival,
            **forced_calls(chat, shared_fields(body)),
        )
        options = self._options([asked], body)
        names_call = chat.tool_choice.name is not None
        shape = ChatShape(options, self._models.card().tokenizer, names_call=names_call)
        return Exchange(requests=[asked], options=options, shape=shape)

    def completion(self, body: Body, origin: Origin) -> Exchange:
        """Read the body of a text completion. Raises KvbatonError."""
        refuse_unserved(body)
        first, *others = prompts_of(body.get("prompt"), self._max_answers, param="prompt")
        one = GenerationRequest(
            request_id=origin.request_id,
            prompt=first,
            max_tokens=1 if without_answer(body) else body.integer("max_tokens"),
            default_max_tokens=COMPLETION_MAX_TOKENS,
            logprobs=body.integer_within("logprobs", 0, MAX_LEGACY_LOGPROBS),
            tenant=origin.tenant,
            arrival=origin.arrival,
            **shared_fields(body),
        )
        if body.flag("echo") and one.prompt_logprobs is None:
            one = replace(one, prompt_logprobs=one.logprobs)
        asked = for_prompts(one, others)
        options = self._options(asked, body)
        view = prompt_view(body, asked, options.num_chosen)
        shape = CompletionShape(options, self._models.card().tokenizer, view)
        return Exchange(requests=asked, options=options, shape=shape)

    def _options(self, all_asked: list[GenerationRequest], body: Body) -> AnswerOptions:
        stream = body.flag("stream")
        if body.get("stream_options") is not None and not stream:
            raise InvalidRequestError("stream_options is allowed with stream only", param="stream_options")
        asked = all_asked[0]
        num_choices = len(all_asked) * asked.num_choices
        if num_choices > self._max_answers:
            raise InvalidRequestError(
                f"{num_choices} answers are too many; a request has {self._max_answers} at most", param="n"
            )
        return AnswerOptions(
            request_id=asked.request_id,
            num_choices=num_choices,
            model=asked.model or self._models.card().name,
            created=int(time.time()),
            stream=stream,
            include_usage=body.object("stream_options").flag("include_usage"),
            logprobs=asked.logprobs is not None,
            return_token_ids=body.flag("return_token_ids"),
            timings=body.flag("timings"),
            num_chosen=choice_counts(body)[0],
            prompt_logprobs=body.get("prompt_logprobs") is not None,
        )


def _chat_logprobs(body: Body) -> int | None:
    top = body.integer_within("top_logprobs", 0, MAX_LOGPROBS)
    if body.flag("logprobs"):
        return top or 0
    if top:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None
