"""The prompt of a message: a text, or token ids."""

from contract.errors import InvalidRequestError
from protos import inference_pb2 as pb


def prompt_of(message: pb.GenerateRequest | pb.EmbedInput, param: str) -> str | tuple[int, ...]:
    """Return the prompt. Raises InvalidRequestError about ``param`` if there is none."""
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case _:
            raise InvalidRequestError(f"{param} has neither text nor token_ids", param=param)
