"""POST /tokenize and /detokenize: what the service's own tokenizer makes of a prompt, by the field names of vLLM."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from contract.errors import InvalidRequestError
from contract.requests import check_token_ids
from router.http.body import Body, Json
from router.http.schema import DETOKENIZE, TOKENIZE
from router.model_source import ModelSource
from router.registry import Registry
from text.chat import parse_messages
from text.model_card import ModelCard

ReadBody = Callable[[web.Request, str, Json], Awaitable[Body]]
"""(request, what its id begins with, its schema) → the fields."""


class TokenizerEndpoints:
    """Owns nothing; a long text is tokenized in a thread."""

    def __init__(self, read_body: ReadBody, models: ModelSource, registry: Registry) -> None:
        self._read_body, self._models, self._registry = read_body, models, registry

    def routes(self) -> list[web.RouteDef]:
        """Both paths."""
        return [web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize)]

    async def tokenize(self, request: web.Request) -> web.Response:
        """The token ids of ``prompt``, or of ``messages`` in the model's chat template."""
        body = await self._read_body(request, "tok", TOKENIZE)
        card = self._models.card_named(body.string("model"))
        ids = await asyncio.to_thread(_encode, body, card)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._registry.max_model_len(card.max_model_len),
            "tokens": ids,
            "token_strs": None,
        }
        if body.flag("return_token_strs"):
            answer["token_strs"] = [card.tokenizer.written(token) for token in ids]
        return web.json_response(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of ``tokens``, special tokens included."""
        body = await self._read_body(request, "detok", DETOKENIZE)
        card = self._models.card_named(body.string("model"))
        if body.get("tokens") is None:
            raise InvalidRequestError("tokens is missing; send a list of token ids", param="tokens")
        ids = body.integers("tokens")
        check_token_ids(ids, card.vocab_size, param="tokens")
        text = await asyncio.to_thread(card.tokenizer.decode, ids, skip_special_tokens=False)
        return web.json_response({"prompt": text})


def _encode(body: Body, card: ModelCard) -> list[int]:
    messages, prompt = body.get("messages"), body.string("prompt")
    if (messages is None) == (prompt is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    if prompt is not None:
        return card.tokenizer.encode(prompt, add_special_tokens=body.flag("add_special_tokens", default=True))
    if card.chat_template is None:
        raise InvalidRequestError(
            f"the model {card.name} has no chat template; send prompt", param="messages"
        )
    text = card.chat_template.render(
        parse_messages(messages), add_generation_prompt=body.flag("add_generation_prompt", default=True)
    )
    return card.tokenizer.encode(text, add_special_tokens=body.flag("add_special_tokens"))
