"""The endpoints that answer with generated text, in one table for HTTP and for the lines of batches."""

from collections.abc import Callable
from dataclasses import dataclass

from router.http.bodies.body import Body, Json
from router.http.exchange import Exchange, Origin
from router.http.generation.parser import GenerationParser
from router.http.messages.parser import MessageParser
from router.http.responses.parser import ResponseParser
from router.http.schema.chat import CHAT
from router.http.schema.completion import COMPLETION
from router.http.schema.messages import MESSAGE
from router.http.schema.responses import RESPONSE
from router.intake.model_source import ModelSource


@dataclass(frozen=True)
class Endpoint:
    """One path. id_prefix: of the ids of its requests. schema: describes its body. parse: raises KvbatonError."""

    id_prefix: str
    schema: Json
    parse: Callable[[Body, Origin], Exchange]


def text_endpoints(models: ModelSource, max_answers: int) -> dict[str, Endpoint]:
    """Return the endpoints by path. max_answers: most answers of one request."""
    generation = GenerationParser(models, max_answers)
    return {
        "/v1/chat/completions": Endpoint("chatcmpl", CHAT, generation.chat),
        "/v1/completions": Endpoint("cmpl", COMPLETION, generation.completion),
        "/v1/responses": Endpoint("resp_", RESPONSE, ResponseParser(models).response),
        "/v1/messages": Endpoint("msg_", MESSAGE, MessageParser(models).message),
    }
