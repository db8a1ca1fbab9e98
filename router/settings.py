"""The settings of one router process."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from contract.errors import SettingError
from router.batches.quota import Bounds
from serving.http_connections import HttpLimits
from serving.settings import Address, Settings, check_secret, read_secret_file
from text.parsing.answer_format import ParserChoice, ReasoningParserName, ToolParserName


def _check_tags(value: str) -> str:
    tags = value.split()
    if len(tags) != 2 or tags[0] == tags[1]:
        raise ValueError(f"{value!r} must be two different tags, separated by a space")
    return value


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,*]+")


def _check_origins(value: str) -> str:
    for origin in _listed(value):
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin; write scheme://host[:port] without a path, or *")
    return value


def _listed(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


class RouterSettings(Settings):
    """Where a router listens, what it serves, and its limits."""

    http: Address = "127.0.0.1:8000"
    """HOST:PORT of the OpenAI HTTP API; port 0 picks a free one."""
    grpc: Address = "127.0.0.1:9000"
    """HOST:PORT of the gRPC API (kvbaton.v1.Inference); port 0 picks a free one."""
    internal: Address = "127.0.0.1:0"
    """HOST:PORT where workers register; they need the cluster secret."""
    admin: Address = "127.0.0.1:0"
    """HOST:PORT of /health, /ready, /metrics and /debug/state for operators; plain HTTP, without API keys."""
    model: Path | None = None
    """Folder of the model (its small files are enough); unset: fetched from the first worker."""
    served_model_name: str | None = None
    """Name under which clients ask for the model; the folder's or the first worker's where unset."""
    secret_file: Path | None = None
    """File with the cluster secret (mode 0600)."""
    secret: str | None = Field(default=None, repr=False)
    """The cluster secret itself, for tests; prefer the file."""
    api_keys: str | None = Field(default=None, repr=False)
    """API keys of clients, separated by commas; prefer the file. Without any, everybody may ask."""
    api_keys_file: Path | None = None
    """File with API keys, one a line, # begins a comment; read again when it changes."""
    metrics_need_key: bool = False
    """Whether /metrics needs an API key too, where there are keys."""
    cors_origins: Annotated[str, AfterValidator(_check_origins)] | None = None
    """Origins of web pages that may call the HTTP API, separated by commas; * is every one."""
    allowed_hosts: str | None = None
    """Names, separated by commas, that HTTP clients may call this router by, beside localhost; * is any. On an address of
    this machine alone others are refused where it is unset, since a web page can point its own name there."""
    tls_certificate_file: Path | None = None
    """Certificate (PEM, with its chain) of the HTTP and gRPC APIs, which then speak TLS only; read again when it changes."""
    tls_key_file: Path | None = None
    """Its private key (PEM, without a passphrase)."""
    strict_api: bool = False
    """Refuse fields of a request that are not known, instead of ignoring them."""
    tool_parser: ToolParserName = "auto"
    """How the model writes tool calls; auto: as its chat template says; none: it has no tools."""
    reasoning_parser: ReasoningParserName = "auto"
    """Whether reasoning is told from the answer: think (always), none, or auto, if the chat template has the tags."""
    special_tokens_in_messages: bool = False
    """Special tokens that a client types in a message count as such; else they are plain text."""
    reasoning_tags: Annotated[str, AfterValidator(_check_tags)] = "<think> </think>"
    """What opens and what closes the reasoning, separated by a space."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Bytes of a request's body; larger ones are answered 413."""
    max_bodies_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Bytes of all bodies that are being received at once; one more is answered 429."""
    max_held_bytes: int = Field(default=512 * 2**20, ge=1024)
    """Bytes of all requests that wait or are answered; more are answered 429, but for API keys that hold less than their
    share."""
    max_body_values: int = Field(default=2**18, ge=1024)
    """Values (numbers, strings, lists, objects) in one body; with more it is answered 413."""
    max_connections: int = Field(default=8192, ge=1)
    """Connections of clients at once, of HTTP and of gRPC; fewer where the limit of open descriptors is too low."""
    max_connections_per_address: int = Field(default=8192, ge=1)
    """HTTP connections at once of one IPv4 address or one IPv6 /64 network; more are answered 503."""
    header_timeout_seconds: float = Field(default=10.0, gt=0)
    """Time for the headers of an HTTP request and for a TLS or HTTP/2 handshake; then the connection is closed."""
    body_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time for the whole body of an HTTP request; then it is answered with an error."""
    idle_timeout_seconds: float = Field(default=75.0, gt=0)
    """How long a connection may stay open between two requests."""
    max_queue: int = Field(default=1024, ge=1)
    """Requests that wait for workers at once; more are answered 429, but for API keys that hold less than their share."""
    max_key_share: float = Field(default=0.5, gt=0, le=1)
    """Share of what the workers decode at once that one API key may hold while other keys are used too; 1: all of it."""
    max_priority: int = Field(default=100, ge=0, lt=2**31)
    """The highest ``priority`` that a request gets; a higher one counts as this."""
    shared_prefix_cache: bool = False
    """Let clients with different API keys reuse each other's cached prompts; ``cached_tokens`` then reveals them."""
    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time from a request's arrival to its last token; then it ends with an error."""
    accept_timeout_seconds: float = Field(default=10.0, gt=0)
    """How long a worker may take to accept a request, a cancel or a router's question."""
    worker_wait_seconds: float = Field(default=30.0, ge=0)
    """How long requests wait for a role that has no worker (one may be starting again); then they are answered 503."""
    max_replays: int = Field(default=5, ge=0)
    """Failed attempts in a row, without a token between them, after which a request goes on with other workers."""
    client_buffer_bytes: int = Field(default=2**20, ge=1024)
    """Bytes of an answer that wait for a client that does not read (four times as many for all answers of one request);
    with more its request is cancelled."""
    max_unread_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes of all answers that wait for clients that do not read; with more the largest request of the client that holds
    most is cancelled."""
    client_stall_seconds: float = Field(default=60.0, gt=0)
    """How long a client may read nothing of an answer before its connection and its request are ended."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running answers may go on when the router is stopped; then they end with an error. A second signal: now."""
    peer_timeout_seconds: float = Field(default=3.0, gt=0)
    """Silence of a worker's connection after which it counts as dead."""
    files_dir: Path | None = None
    """Folder of uploaded files and of batches (/v1/files, /v1/batches), of this router alone; unset: it has neither."""
    files_max_bytes: int = Field(default=200 * 2**20, ge=1)
    """Bytes of one uploaded file; larger ones are answered 413."""
    files_total_bytes: int = Field(default=10 * 2**30, ge=1)
    """Bytes of all files together; uploads beyond are answered 413, and batches wait for room."""
    files_max_count: int = Field(default=10_000, ge=3)
    """Files and batches that are kept at once."""
    files_key_share: float = Field(default=0.5, gt=0, le=1)
    """Share of files_total_bytes, files_max_count and batches_max_open that one API key may use."""
    files_retention_seconds: int = Field(default=30 * 24 * 3600, ge=3600)
    """How long files, and batches that are over, are kept at most."""
    batches_max_open: int = Field(default=64, ge=1)
    """Batches that are not over at once; more are answered 429."""
    batches_max_lines: int = Field(default=50_000, ge=1)
    """Requests of one batch."""
    batches_max_concurrency: int = Field(default=8, ge=1)
    """Requests of batches that run at once; they begin only while no other request waits for workers."""

    @property
    def files_bounds(self) -> Bounds:
        """The limits of the folder of files."""
        return Bounds(
            file_bytes=self.files_max_bytes,
            total_bytes=self.files_total_bytes,
            count=self.files_max_count,
            open_batches=self.batches_max_open,
            key_share=self.files_key_share,
            retention_seconds=self.files_retention_seconds,
            batch_lines=self.batches_max_lines,
            line_bytes=self.max_body_bytes,
        )

    @property
    def origins(self) -> tuple[str, ...]:
        """``cors_origins`` one by one."""
        return _listed(self.cors_origins or "")

    def http_limits(self, max_connections: int) -> HttpLimits:
        """Return what HTTP clients may hold. max_connections: what the limit of descriptors allows."""
        return HttpLimits(
            max_connections=max_connections,
            max_per_address=min(max_connections, self.max_connections_per_address),
            header_seconds=self.header_timeout_seconds,
            idle_seconds=self.idle_timeout_seconds,
            stall_seconds=self.client_stall_seconds,
        )

    @property
    def parsers(self) -> ParserChoice:
        """How answers are read."""
        opening, closing = self.reasoning_tags.split()
        return ParserChoice(
            self.tool_parser,
            self.reasoning_parser,
            (opening, closing),
            special_tokens_in_messages=self.special_tokens_in_messages,
        )

    def read_secret(self) -> str:
        """The cluster secret; raises SettingError where there is none, two are given, or it is weak."""
        if self.secret and self.secret_file:
            raise SettingError(
                "secret (KVBATON_SECRET) and secret_file are both set; workers know the file's only: unset secret",
                param="secret",
            )
        if not self.secret:
            return read_secret_file(self.secret_file)
        secret = self.secret.strip()  # as a file's: workers read theirs there
        check_secret(secret, "secret (KVBATON_SECRET)", "secret")
        return secret
