"""The errors that cross module and process boundaries, as one short tree.

    KvbatonError
    ├── InvalidRequestError        the client's input is wrong (INVALID_REQUEST)
    │   ├── ContextLengthError     prompt + max_tokens do not fit the model
    │   └── UnsupportedFieldError  a field that this version does not support
    ├── NotFoundError              unknown model or path (NOT_FOUND)
    ├── UnauthenticatedError       a peer or client is not authenticated (UNAUTHENTICATED)
    ├── PayloadTooLargeError       a body over the limit (PAYLOAD_TOO_LARGE)
    ├── UnsupportedMediaTypeError  a body that is not JSON (UNSUPPORTED_MEDIA_TYPE)
    ├── OverloadedError            the queue is full, try again (OVERLOADED)
    ├── UnavailableError           no worker of the needed role is ready (UNAVAILABLE)
    ├── WorkerLostError            a worker died with the request (WORKER_LOST)
    ├── DeadlineError              a wait exceeded its deadline (DEADLINE)
    ├── CancelledError             the client or an operator ended the request (CANCELLED)
    ├── TransferError              KV could not be handed over (TRANSFER_FAILED)
    │   ├── PeerUnreachableError   this worker cannot reach the other one (PEER_UNREACHABLE)
    │   └── IncompatiblePeerError  two workers whose layouts, models or protocols differ (INCOMPATIBLE)
    ├── SettingError               a setting is unknown, out of range or contradictory (INVALID_SETTING)
    └── InternalError              a bug in kvbaton (INTERNAL)

A message names the problem, the limit, the requested amount, and the remedy.
"""

from enum import StrEnum

SIZE_PARAM = "prompt"
"""``param`` of the error with which an engine rejects a request that is too long for it."""


class ErrorKind(StrEnum):
    """The meaning of an error for its receiver; ``serving.errors`` maps each kind to gRPC, HTTP and OpenAI."""

    INVALID_REQUEST = "invalid_request"
    NOT_FOUND = "not_found"
    UNAUTHENTICATED = "unauthenticated"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    WORKER_LOST = "worker_lost"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    TRANSFER_FAILED = "transfer_failed"
    PEER_UNREACHABLE = "peer_unreachable"
    INCOMPATIBLE = "incompatible"
    INVALID_SETTING = "invalid_setting"
    INTERNAL = "internal"


TRANSFER_KINDS = (ErrorKind.TRANSFER_FAILED, ErrorKind.PEER_UNREACHABLE, ErrorKind.INCOMPATIBLE)
"""The kinds of error of a hand-over that another pair of workers may not have."""
_MAX_MESSAGE = 2048


def _bounded(message: str) -> str:
    """Return a message, which may quote a request or a peer, in a length that suits a log and an answer."""
    if len(message) <= _MAX_MESSAGE:
        return message
    half = _MAX_MESSAGE // 2
    return f"{message[:half]} ... {len(message) - 2 * half} characters ... {message[-half:]}"


class KvbatonError(Exception):
    """The root of the tree: a message for people, a kind for programs. A very long message is shortened.

    param: the request field or setting at fault, if any. code: the OpenAI error code, if any.
    """

    kind = ErrorKind.INTERNAL

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        message = _bounded(message)
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(KvbatonError):
    """The client's input is wrong."""

    kind = ErrorKind.INVALID_REQUEST


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and answer together, do not fit the model."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class UnsupportedFieldError(InvalidRequestError):
    """A valid field that this version does not support."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="unsupported_parameter")


class NotFoundError(KvbatonError):
    """An unknown model, path or request."""

    kind = ErrorKind.NOT_FOUND


class UnauthenticatedError(KvbatonError):
    """A peer or client is not authenticated."""

    kind = ErrorKind.UNAUTHENTICATED


class PayloadTooLargeError(KvbatonError):
    """A body over the limit."""

    kind = ErrorKind.PAYLOAD_TOO_LARGE


class UnsupportedMediaTypeError(KvbatonError):
    """A body of another type than JSON."""

    kind = ErrorKind.UNSUPPORTED_MEDIA_TYPE


class OverloadedError(KvbatonError):
    """The service is full; the same request may be accepted later."""

    kind = ErrorKind.OVERLOADED


class UnavailableError(KvbatonError):
    """No worker of the needed role is ready."""

    kind = ErrorKind.UNAVAILABLE


class WorkerLostError(KvbatonError):
    """A worker died while it held the request."""

    kind = ErrorKind.WORKER_LOST


class DeadlineError(KvbatonError):
    """A wait exceeded its deadline."""

    kind = ErrorKind.DEADLINE


class CancelledError(KvbatonError):
    """The client, or an operator, ended the request."""

    kind = ErrorKind.CANCELLED


class TransferError(KvbatonError):
    """KV could not be handed over; nothing of it was used."""

    kind = ErrorKind.TRANSFER_FAILED


class PeerUnreachableError(TransferError):
    """The link or data connection to the other worker cannot be made, is refused, is silent or broke.

    The worker that reports it is alive. The other one may be alive too, with a broken network between them.
    """

    kind = ErrorKind.PEER_UNREACHABLE


class IncompatiblePeerError(TransferError):
    """Two workers whose model, KV layout or protocol differ."""

    kind = ErrorKind.INCOMPATIBLE


class SettingError(KvbatonError):
    """A setting is unknown, out of range or contradictory."""

    kind = ErrorKind.INVALID_SETTING


class InternalError(KvbatonError):
    """A bug in kvbaton."""

    kind = ErrorKind.INTERNAL


def _all_errors(root: type[KvbatonError]) -> list[type[KvbatonError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all_errors(child))]


def error_from_kind(kind: str, message: str, param: str | None = None) -> KvbatonError:
    """Rebuild an error from its kind, message and field, received over a wire (an unknown kind becomes INTERNAL)."""
    # A class stands before its subclasses, so the one that the kind was made for is found first.
    for error_class in _all_errors(KvbatonError)[1:]:
        if error_class.kind == kind:
            return error_class(message, param=param)
    return InternalError(message)
