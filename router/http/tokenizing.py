"""Tokens without an answer: /tokenize and /detokenize with vLLM's field names, and Anthropic's count of messages."""

import time
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from contract.errors import InvalidRequestError
from contract.requests import check_token_ids
from router.http.bodies.body import Body, Json
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.boundary import origin_of
from router.http.fields.chat import chat_of
from router.http.messages.parser import MessageParser
from router.http.schema.chat import DETOKENIZE, TOKENIZE
from router.http.schema.messages import COUNT
from router.intake.request_preparer import encode_text, size_of
from router.request_path import RequestPath
from text.length_bound import check_text_size
from text.model_card import ModelCard


class TokenizerEndpoints:
    """Handlers that call the served model's tokenizer. Long texts are processed on its threads (``TokenizerThreads``)."""

    def __init__(self, bodies: JsonBodyReader, path: RequestPath) -> None:
        self._bodies = bodies
        self._path = path
        self._messages = MessageParser(path.models)

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/v1/messages/count_tokens", self.count),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: the token ids of ``prompt``, or of ``messages`` in the model's chat template."""
        body = await self._bodies.read(request, "tok", TOKENIZE)
        card = self._path.models.card_named(body.string("model"))
        max_model_len = self._path.registry.max_model_len(card.max_model_len)
        size, encode = _encoding(body, card, max_model_len)
        ids = await self._path.tokenizers.run(size, encode)
        answer: Json = {
            "count": len(ids),
            "max_model_len": max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.flag("return_token_strs"):
            answer["token_strs"] = [card.tokenizer.written(token) for token in ids]
        return web.json_response(body=msgspec.json.encode(answer))

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: the text of ``tokens``, special tokens included."""
        body = await self._bodies.read(request, "detok", DETOKENIZE)
        card = self._path.models.card_named(body.string("model"))
        if body.get("tokens") is None:
            raise InvalidRequestError("tokens is missing; send a list of token ids", param="tokens")
        ids = body.integers("tokens")
        check_token_ids(ids, card.vocab_size, param="tokens")
        decode = partial(card.tokenizer.decode, ids, skip_special_tokens=False)
        text = await self._path.tokenizers.run(len(ids), decode)
        return web.json_response({"prompt": text})

    async def count(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        arrival = time.monotonic()
        body = await self._bodies.read(request, "count_", COUNT)
        counted = self._messages.count(body, origin_of(request, arrival))
        num_tokens = await self._path.pipeline.preparer.num_prompt_tokens(counted)
        return web.json_response({"input_tokens": num_tokens})


def _encoding(body: Body, card: ModelCard, max_tokens: int) -> tuple[int, Callable[[], list[int]]]:
    """Return about how many characters the body's text has, and a function that tokenizes it."""
    messages = body.get("messages")
    prompt = body.string("prompt")
    if (messages is None) == (prompt is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    # a chat template writes the special tokens itself
    has_special = body.flag("add_special_tokens", default=prompt is not None)
    if prompt is not None:
        return len(prompt), partial(encode_text, card.tokenizer, prompt, max_tokens, has_special)
    template = card.chat_template
    if template is None:
        raise InvalidRequestError(
            f"the model {card.name} has no chat template; send prompt", param="messages"
        )
    chat = chat_of(body)

    def encode() -> list[int]:
        prompt = template.prompt(chat)
        if has_special:
            return encode_text(card.tokenizer, prompt.text, max_tokens, has_special)
        # checked once more: a template may write far more than it was given
        check_text_size(prompt.text, max_tokens, "messages")
        return card.encode_prompt(prompt)

    return size_of(chat), encode
