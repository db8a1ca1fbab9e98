"""A prefill and a decode engine in this process, joined by real connectors, and requests that use both."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from contract.identity import Role
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer
from contract.sampling import SamplingParams
from engine.client import EngineClient, InProcessClient
from engine.connecting import ConnectorFactory, Transfers
from engine.settings import EngineSettings
from kv_transfer.connector import TransferFactory
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.transport import ReceiverTransport
from roles.table import STAGES

Decorate = Callable[[ReceiverTransport], ReceiverTransport]


@dataclass
class EnginePair:
    """Both engines. ``ask`` does what the router does for one request."""

    prefill: EngineClient
    decode: EngineClient

    async def ask(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, **fields: Any
    ) -> tuple[list[EngineOutput], list[EngineOutput]]:
        """Send both legs at once and return their outputs."""
        send, receive = self.legs(request_id, prompt, sampling, **fields)
        return await asyncio.gather(outputs_of(self.prefill, send), outputs_of(self.decode, receive))

    def legs(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        first_index: int = 0,
        **fields: Any,
    ) -> tuple[EngineRequest, EngineRequest]:
        """Return the two engine requests of one hand-over. The prompt already ends with ``first_index`` answer tokens."""
        source = ReceiveTransfer(
            transfer_id=f"transfer-{request_id}",
            peer_worker_id="prefill",
            peer_boot_id="boot-prefill",
            peer_control=self.prefill.info.control_address,
        )
        both = {"request_id": request_id, "prompt_token_ids": prompt, "sampling": sampling, **fields}
        send = EngineRequest(**both, first_index=first_index, transfer=SendTransfer(source.transfer_id))
        return send, EngineRequest(**both, first_index=first_index + 1, transfer=source)

    async def idle_states(self) -> list[dict[str, Any]]:
        """Check the invariants of both engines and return their /debug/state."""
        for client in (self.prefill, self.decode):
            await client.call("check_integrity")
        return [await client.call("debug_state") for client in (self.prefill, self.decode)]

    async def until_free(self) -> None:
        """Wait until no block is held or quarantined. The release crosses the link after the last token."""
        async with asyncio.timeout(20):
            while any(s["blocks"]["held"] or s["blocks"]["quarantined"] for s in await self.idle_states()):
                await asyncio.sleep(0.01)


async def outputs_of(client: EngineClient, request: EngineRequest) -> list[EngineOutput]:
    """Return all outputs of one request."""
    return [output async for output in client.generate(request)]


def tokens_of(*legs: list[EngineOutput]) -> list[int]:
    """Return the tokens of several legs, in order."""
    return [token for outputs in legs for output in outputs for token in output.token_ids]


@dataclass(frozen=True)
class Sides:
    """Settings that differ between the two engines, and the connection between them.

    connect: role → connector factory; replaces the real connector over ``transport``, which has the settings ``links``.
    """

    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    transport: str = "tcp"
    links: dict[str, Any] = field(default_factory=dict)
    connect: Callable[[Role], ConnectorFactory] | None = None


@asynccontextmanager
async def running_pair(
    model: Path, decorate: Decorate | None = None, sides: Sides | None = None, **settings: Any
) -> AsyncIterator[EnginePair]:
    """Run two engines on ``model``, in float32 unless ``sides`` overrides it. ``settings`` apply to both."""
    sides = sides or Sides()
    both = {"model": model, "dtype": "float32", "kv_cache_bytes": 16 * 2**20, **settings}

    def connect(role: Role, decorate: Decorate | None) -> ConnectorFactory:
        if sides.connect:
            return sides.connect(role)
        return transfer_factory(role, decorate, sides.transport, **sides.links)

    sender = EngineSettings(**{**both, **sides.prefill})
    prefill = await InProcessClient.start(sender, Transfers(connect(Role.PREFILL, None), STAGES))
    try:
        receiver = EngineSettings(**{**both, **sides.decode})
        decode = await InProcessClient.start(receiver, Transfers(connect(Role.DECODE, decorate), STAGES))
        try:
            yield EnginePair(prefill, decode)
        finally:
            await decode.shutdown()
    finally:
        await prefill.shutdown()


def transfer_factory(
    role: Role, decorate: Decorate | None, transport: str, **settings: Any
) -> TransferFactory:
    """Return the factory of the real connector for one side of a pair."""
    return TransferFactory(
        TransferSettings(
            worker_id=role.value,
            boot_id=f"boot-{role.value}",
            role=role,
            secret="a secret of the tests, of 32 or more characters",
            transport=cast(Any, transport),
            peer_timeout_seconds=20.0,
            decorate=decorate,
            **settings,
        )
    )
