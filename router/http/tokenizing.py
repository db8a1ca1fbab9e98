"""POST /tokenize and /detokenize, with vLLM's field names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web

from contract.errors import InvalidRequestError
from contract.requests import check_token_ids
from router.http.bodies.body import Body, Json
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.fields.chat import chat_of
from router.http.schema.tokenizing import DETOKENIZE, TOKENIZE
from router.intake.model_source import ModelSource
from router.intake.tokenizing import TokenizerThreads, encode_text, size_of
from router.workers.registry import Registry
from text.length_bound import check_text_size
from text.model_card import ModelCard


class TokenizerEndpoints:
    """Handlers that call the served model's tokenizer. Long texts are processed by ``tokenizers``."""

    def __init__(
        self, bodies: JsonBodyReader, models: ModelSource, registry: Registry, tokenizers: TokenizerThreads
    ) -> None:
        self._bodies = bodies
        self._models = models
        self._registry = registry
        self._tokenizers = tokenizers

    def routes(self) -> list[web.RouteDef]:
        """Return both paths."""
        return [web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize)]

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: the token ids of ``prompt``, or of ``messages`` in the model's chat template."""
        body = await self._bodies.read(request, "tok", TOKENIZE)
        card = self._models.card_named(body.string("model"))
        max_model_len = self._registry.max_model_len(card.max_model_len)
        work = _encoding(body, card, max_model_len)
        ids = await self._tokenizers.run(work.size, work.run)
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
        card = self._models.card_named(body.string("model"))
        if body.get("tokens") is None:
            raise InvalidRequestError("tokens is missing; send a list of token ids", param="tokens")
        ids = body.integers("tokens")
        check_token_ids(ids, card.vocab_size, param="tokens")
        decode = partial(card.tokenizer.decode, ids, skip_special_tokens=False)
        text = await self._tokenizers.run(len(ids), decode)
        return web.json_response({"prompt": text})


@dataclass(frozen=True)
class _Encoding:
    """A text of about ``size`` characters. run: tokenizes it."""

    size: int
    run: Callable[[], list[int]]


def _encoding(body: Body, card: ModelCard, max_tokens: int) -> _Encoding:
    messages = body.get("messages")
    prompt = body.string("prompt")
    if (messages is None) == (prompt is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    has_special = body.flag("add_special_tokens", default=prompt is not None)
    if prompt is not None:
        return _Encoding(len(prompt), partial(encode_text, card.tokenizer, prompt, max_tokens, has_special))
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
        check_text_size(prompt.text, max_tokens, "messages")
        return card.encode_prompt(prompt)

    return _Encoding(size_of(chat), encode)
