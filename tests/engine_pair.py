"""A prefill and a decode engine in this process, joined by real tcp connectors, and requests that cross them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.identity import Role
from contract.requests import EngineOutput, EngineRequest, ReceiveTransfer, SamplingParams, SendTransfer
from engine.client import EngineClient, InProcessClient
from engine.settings import EngineSettings
from kv_transfer.connector import TransferFactory
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import ReceiverTransport

Decorate = Callable[[ReceiverTransport], ReceiverTransport]


@dataclass
class EnginePair:
    """Both engines; ``ask`` plays the router's part for one request."""

    prefill: EngineClient
    decode: EngineClient

    async def ask(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, **fields: Any
    ) -> tuple[list[EngineOutput], list[EngineOutput]]:
        """Send both legs at once; their outputs."""
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
        """The two engine requests of one hand-over; ``first_index`` tokens of the answer end the prompt already."""
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
        """/debug/state of both engines, after their books were checked."""
        for client in (self.prefill, self.decode):
            await client.call("check_integrity")
        return [await client.call("debug_state") for client in (self.prefill, self.decode)]

    async def until_free(self) -> None:
        """Until no block is held or quarantined: the release crosses the link after the last token."""
        async with asyncio.timeout(20):
            while any(s["blocks"]["held"] or s["blocks"]["quarantined"] for s in await self.idle_states()):
                await asyncio.sleep(0.01)


async def outputs_of(client: EngineClient, request: EngineRequest) -> list[EngineOutput]:
    """All outputs of one request."""
    return [output async for output in client.generate(request)]


def tokens_of(*legs: list[EngineOutput]) -> list[int]:
    """The tokens of several legs, in order."""
    return [token for outputs in legs for output in outputs for token in output.token_ids]


@asynccontextmanager
async def running_pair(
    model: Path, decorate: Decorate | None = None, **settings: Any
) -> AsyncIterator[EnginePair]:
    """Two engines on ``model`` in float32."""
    engine = EngineSettings(**{"model": model, "dtype": "float32", "kv_cache_bytes": 16 * 2**20, **settings})
    prefill = await InProcessClient.start(engine, _factory(Role.PREFILL, None))
    try:
        decode = await InProcessClient.start(engine, _factory(Role.DECODE, decorate))
        try:
            yield EnginePair(prefill, decode)
        finally:
            await decode.shutdown()
    finally:
        await prefill.shutdown()


def _factory(role: Role, decorate: Decorate | None) -> TransferFactory:
    return TransferFactory(
        TransferSettings(
            worker_id=role.value,
            boot_id=f"boot-{role.value}",
            role=role,
            secret="a secret of the tests",
            transport="tcp",
            peer_timeout_seconds=20.0,
            decorate=decorate,
        )
    )
