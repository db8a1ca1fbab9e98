"""The settings of one router process."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from contract.errors import SettingError
from contract.options import DrainOptions
from router.intake.limits import MAX_PROMPTS
from router.telemetry.goals import Goals
from serving.admin_access import AdminKeyOptions
from serving.http_connections import HttpLimits
from serving.http_hosts import HostNameOptions
from serving.metrics import MetricsOptions
from serving.settings import (
    HttpAddress,
    ListenAddress,
    ProcessSettings,
    check_secret,
    listed,
    read_secret_file,
)
from text.parsing.answer_format import ParserChoice, ReasoningParserName, ToolParserName


def _check_root_path(value: str) -> str:
    if value and not re.fullmatch(r"(?:/[A-Za-z0-9._~-]+)+", value):
        raise ValueError(f"{value!r} is no path such as /llm, without a slash at its end")
    return value


def _check_tags(value: str) -> str:
    tags = value.split()
    if len(tags) != 2 or tags[0] == tags[1]:
        raise ValueError(f"{value!r} must be two different tags, separated by a space")
    return value


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,*]+")


def _check_origins(value: str) -> str:
    for origin in listed(value):
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin; write scheme://host[:port] without a path, or *")
    return value


class RouterSettings(HostNameOptions, AdminKeyOptions, DrainOptions, MetricsOptions, ProcessSettings):
    """The addresses, the model and the limits of a router."""

    http: HttpAddress = "127.0.0.1:8000"
    """HOST:PORT of the OpenAI HTTP API (port 0 picks a free one), or unix:/PATH."""
    root_path: Annotated[str, AfterValidator(_check_root_path)] | None = None
    """Path before those of the HTTP API (/llm: /llm/v1/models) that a reverse proxy passes on; also served without it."""
    grpc: ListenAddress = "127.0.0.1:9000"
    """HOST:PORT of the gRPC API (kvbaton.v1.Inference); port 0 picks a free one."""
    reuse_port: bool = False
    """Let other routers of the same user listen on the same HTTP and gRPC ports; the system distributes the connections."""
    internal: ListenAddress = "127.0.0.1:0"
    """HOST:PORT where workers register with the cluster secret."""
    admin: ListenAddress = "127.0.0.1:0"
    """HOST:PORT of /health, /ready, /metrics, /debug/state and /admin for operators; plain HTTP, without API keys."""
    model: Path | None = None
    """Folder of the model (its small files are enough); unset: loaded from the first worker."""
    served_model_name: str | None = None
    """Names of the model for clients, separated by commas; unset: the name of the folder, or of the first worker's model."""
    secret_file: Path | None = None
    """File with the cluster secret (mode 0600)."""
    secret: str | None = Field(default=None, repr=False)
    """The cluster secret itself, for tests; prefer the file. Not accepted as a flag."""
    api_keys: str | None = Field(default=None, repr=False)
    """API keys of clients, separated by commas; prefer the file. Not accepted as a flag, which other users of this
    machine can see. Without any key, every client is accepted."""
    api_keys_file: Path | None = None
    """File with API keys, one per line; # begins a comment. It is read again when it changes."""
    metrics_need_key: bool = True
    """Require an API key for /metrics on the HTTP port, if there are keys: its sums show what other clients send. The admin
    port needs none."""
    ttft_goal_ms: float = Field(default=1000.0, gt=0, le=600_000)
    """Goal for the time to the first token, for the metrics of goals and of scaling."""
    itl_goal_ms: float = Field(default=100.0, gt=0, le=600_000)
    """Goal for the mean time between the tokens of an answer, for the same metrics."""
    cors_origins: Annotated[str, AfterValidator(_check_origins)] | None = None
    """Origins of web pages that may call the HTTP API, separated by commas; * allows every origin."""
    tls_certificate_file: Path | None = None
    """Certificate (PEM, with its chain) of the HTTP and gRPC APIs, which then accept only TLS; read again when changed."""
    tls_key_file: Path | None = None
    """Private key of the certificate (PEM, without a passphrase)."""
    strict_api: bool = False
    """Reject unknown fields of requests, tools that cannot run here and limits of answers beyond the model's length."""
    tool_parser: ToolParserName = "auto"
    """Format of the model's tool calls; auto: detected from its chat template; none: no tools."""
    reasoning_parser: ReasoningParserName = "auto"
    """Separate reasoning from the answer: think (always), none, or auto (if the chat template has the tags)."""
    special_tokens_in_messages: bool = False
    """Interpret special tokens in the text of messages; otherwise they are plain text."""
    reasoning_tags: Annotated[str, AfterValidator(_check_tags)] = "<think> </think>"
    """Opening and closing tag of the reasoning, separated by a space."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Bytes of a request's body; larger ones get status 413."""
    max_bodies_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Bytes of all bodies that are being received; beyond that, new ones get status 429."""
    max_held_bytes: int = Field(default=512 * 2**20, ge=1024)
    """Bytes of all requests that wait or are being answered; beyond that, new ones get status 429, except from API keys
    below their share."""
    max_body_values: int = Field(default=2**18, ge=1024)
    """Values (numbers, strings, lists, objects) in one body; a body with more gets status 413."""
    max_connections: int = Field(default=8192, ge=1)
    """Open connections of clients, for HTTP and for gRPC each; fewer if the limit of open descriptors is too low."""
    max_connections_per_address: int = Field(default=8192, ge=1)
    """Open connections of one IPv4 address or IPv6 /64 network, for HTTP (further ones get status 503) and gRPC each."""
    header_timeout_seconds: float = Field(default=10.0, gt=0)
    """Time for the headers of an HTTP request or gRPC call, and a TLS or HTTP/2 handshake; then the connection is closed."""
    body_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time for the whole body of a request; then it ends with an error."""
    idle_timeout_seconds: float = Field(default=75.0, gt=0)
    """Time that a connection may stay open between two requests."""
    max_queue: int = Field(default=1024, ge=1)
    """Requests that wait for workers; further ones get status 429, except from API keys below their share."""
    max_key_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the workers' decode capacity that one API key may use while other keys are active; 1: all of it."""
    max_priority: int = Field(default=100, ge=0, lt=2**31)
    """The highest ``priority`` of a request; higher ones are lowered to it."""
    priority_order: Literal["higher-first", "lower-first"] = "higher-first"
    """Order of ``priority``: requests with a higher one run earlier, or, as in vLLM, those with a lower one, whose negative
    max_priority then limits."""
    shared_prefix_cache: bool = False
    """Let clients with different API keys reuse each other's cached prompts; ``cached_tokens`` then reveals them."""
    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time from a request's arrival to its last token; then it ends with an error."""
    accept_timeout_seconds: float = Field(default=10.0, gt=0)
    """Time for a worker to carry out an order or a call of the router."""
    worker_wait_seconds: float = Field(default=30.0, ge=0)
    """Time that requests wait for a role without any worker (one may be restarting); then they get status 503."""
    max_worker_deaths: int = Field(default=3, ge=1)
    """Workers that may be lost with one request before it ends with an error: it may be the cause."""
    max_replays: int = Field(default=5, ge=0)
    """Consecutive failed attempts without a new token that a request survives; after one more it ends with an error."""
    client_buffer_bytes: int = Field(default=2**20, ge=1024)
    """Bytes of one answer that its client has not read (four times as many for all answers of one request); beyond that, the
    request is cancelled."""
    max_unread_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes of all answers that clients have not read; beyond that, the largest request of the client with the most bytes is
    cancelled."""
    client_stall_seconds: float = Field(default=60.0, gt=0)
    """Time for which a client may read nothing of an answer; then its connection is closed and its request cancelled."""
    stream_keep_alive_seconds: float = Field(default=15.0, ge=0)
    """Silence after which a stream gets its headers and a comment (/v1/messages: a ping), so that proxies do not end it; a
    gRPC connection with an open call gets a ping (at the latest after 30 s). 0: no comments, and pings after 30 s."""
    peer_timeout_seconds: float = Field(default=3.0, gt=0)
    """Silence on a worker's connection after which it counts as dead."""
    files_dir: Path | None = None
    """Folder of files and batches (/v1/files, /v1/batches), for this router only; unset: both are disabled."""
    files_max_bytes: int = Field(default=200 * 2**20, ge=1)
    """Bytes of one uploaded file; larger ones get status 413."""
    files_total_bytes: int = Field(default=10 * 2**30, ge=1)
    """Bytes of all files; beyond that, uploads get status 413, and batches wait for room."""
    files_max_count: int = Field(default=10_000, ge=3)
    """Stored files and batches."""
    files_key_share: float = Field(default=0.5, gt=0, le=1)
    """Share of files_total_bytes, files_max_count and batches_max_open that one API key may use."""
    files_retention_seconds: int = Field(default=30 * 24 * 3600, ge=3600)
    """Longest time that files, and batches that are over, are kept."""
    batches_max_open: int = Field(default=64, ge=1)
    """Open batches; beyond that, new ones get status 429."""
    batches_max_lines: int = Field(default=50_000, ge=1)
    """Requests of one batch."""
    batches_max_concurrency: int = Field(default=8, ge=1)
    """Running requests of batches; they begin only while no other request waits for workers."""

    @property
    def goals(self) -> Goals:
        """The goals of latency."""
        return Goals(self.ttft_goal_ms / 1000, self.itl_goal_ms / 1000)

    @property
    def max_answers(self) -> int:
        """Most answers of one request, which all wait in the queue at once."""
        return min(MAX_PROMPTS, self.max_queue)

    @property
    def origins(self) -> tuple[str, ...]:
        """``cors_origins`` as a tuple."""
        return listed(self.cors_origins or "")

    def http_limits(self, max_connections: int) -> HttpLimits:
        """Return the limits on HTTP clients. max_connections: the limit that open descriptors allow."""
        return HttpLimits(
            max_connections=max_connections,
            max_per_address=min(max_connections, self.max_connections_per_address),
            header_seconds=self.header_timeout_seconds,
            idle_seconds=self.idle_timeout_seconds,
            stall_seconds=self.client_stall_seconds,
        )

    @property
    def parsers(self) -> ParserChoice:
        """The parsers of answers."""
        opening, closing = self.reasoning_tags.split()
        return ParserChoice(
            self.tool_parser,
            self.reasoning_parser,
            (opening, closing),
            special_tokens_in_messages=self.special_tokens_in_messages,
        )

    def read_secret(self) -> str:
        """Return the cluster secret. Raises SettingError if there is none, if two are given, or if it is weak."""
        if self.secret and self.secret_file:
            raise SettingError(
                "secret (KVBATON_SECRET) and secret_file are both set, but workers read only the file: unset secret",
                param="secret",
            )
        if not self.secret:
            return read_secret_file(self.secret_file)
        secret = self.secret.strip()  # as workers do with the content of the file
        check_secret(secret, "secret (KVBATON_SECRET)", "secret")
        return secret
