"""Sends requests to the admin ports of routers, of one or of all of a service."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from contract.decoding import converter
from contract.errors import KvbatonError, NotFoundError, UnauthenticatedError, UnavailableError
from contract.scaling import ScalingLease, ScalingReport

_TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=5.0)
_LEASE_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
"""A frozen router must not hold up the decision about the others for longer."""
_KEY_HINT = "give an admin key of the router as KVBATON_ADMIN_KEY"
_RELOAD_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
"""Weights may take minutes to read."""
_SILENT_SECONDS = 2.0
"""The time after which a router that does not answer is shown as such, when another one has answered."""
_STATES = ("changing", "draining", "empty", "serving", "starting", "leaving")
"""States of a worker, in the order in which those of several routers count."""
Facts = Mapping[str, Any]
_lease_of = converter(ScalingLease)


def admin_session(key: str | None) -> aiohttp.ClientSession:
    """Return a session for ``RouterAdmin`` that sends this admin key; None: the routers have no keys."""
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"} if key else None)


class RouterAdmin:
    """The admin API of the router at ``address``. session: see ``admin_session``."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.address = address
        self._session = session

    async def pool(self) -> dict[str, Any]:
        """Return the router's list of workers, with its own figures.

        Raises UnavailableError if no router answers there, UnauthenticatedError for a wrong or missing key, KvbatonError
        with the router's message for another error.
        """
        return await self._request("GET", "/admin/workers")

    async def order(self, worker: str, verb: str, **query: float | str | None) -> dict[str, Any]:
        """Let a worker ``drain``, ``undrain`` or ``flip``; return its entry of the list, once the router answers.

        query: ``deadline`` (seconds), ``role``. Raises NotFoundError for a worker that is not attached, and what
        ``pool`` raises.
        """
        given = {
            name: value if isinstance(value, str) else f"{value:g}"
            for name, value in query.items()
            if value is not None
        }
        path = f"/admin/workers/{quote(worker, safe='')}/{verb}"
        return await self._request("POST", path, given)

    async def reset_prefix_cache(self) -> list[str]:
        """Let all workers drop their prefix caches; return their ids. Raises what ``pool`` raises, also if one does not."""
        reply = await self._request("POST", "/admin/reset_prefix_cache")
        return [str(name) for name in reply["workers"]]

    async def reload_weights(self, wait: float | None) -> list[str]:
        """Let all workers read their weights again; return their ids. wait: seconds for running requests to end.

        Raises what ``pool`` raises, also if the weights of one are not those that are served now.
        """
        query = {} if wait is None else {"wait": f"{wait:g}"}
        reply = await self._request("POST", "/admin/reload_weights", query, limit=_RELOAD_TIMEOUT)
        return [str(name) for name in reply["workers"]]

    async def report_scaling(self, report: ScalingReport) -> None:
        """Send a decision of the autoscaler, which the router publishes. Raises what ``pool`` raises."""
        await self._request("PUT", "/admin/scaling", body=msgspec.json.encode(report))

    async def lease_scaling(self, lease: ScalingLease) -> ScalingLease:
        """Ask for the right to scale the service, or give it back; return who has it. Raises what ``pool`` raises."""
        path = "/admin/scaling/lease"
        reply = await self._request("PUT", path, body=msgspec.json.encode(lease), limit=_LEASE_TIMEOUT)
        try:
            return _lease_of(reply)
        except msgspec.ValidationError as error:
            raise UnavailableError(f"router {self.address} answers PUT {path} with {reply}") from error

    async def metrics(self) -> str:
        """Return the router's metrics in Prometheus' text format. Raises UnavailableError if it does not answer."""
        status, text = await self._send("GET", "/metrics")
        if status != 200:
            raise UnavailableError(f"http://{self.address}/metrics answers with status {status}")
        return text

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: aiohttp.ClientTimeout = _TIMEOUT,
    ) -> dict[str, Any]:
        status, text = await self._send(method, path, query, body, limit)
        reply = _parsed(text)
        if reply is None:
            raise UnavailableError(
                f"{self.address} is not the admin port of a router: it answers {method} {path} with status {status}"
            )
        if status in (200, 202):
            return reply
        error = reply.get("error")
        reason = error["message"] if isinstance(error, dict) and "message" in error else "an unknown error"
        message = f"router {self.address}: {reason}"
        if status == 401:
            raise UnauthenticatedError(f"{message}; {_KEY_HINT}")
        if status == 404:
            raise NotFoundError(message)
        raise KvbatonError(message)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: aiohttp.ClientTimeout = _TIMEOUT,
    ) -> tuple[int, str]:
        """Return status and text of the answer."""
        url = f"http://{self.address}{path}"
        try:
            async with self._session.request(method, url, params=query, data=body, timeout=limit) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
                reason = error.os_error.strerror  # aiohttp's own text has the address once more
            raise UnavailableError(f"no router answers at {self.address}: {reason}") from error


class ServiceAdmin:
    """All routers of a service, as one: their lists are merged, and an order goes to the first one that answers."""

    def __init__(self, admins: Sequence[RouterAdmin]) -> None:
        self._admins = list(admins)

    async def pool(self) -> dict[str, Any]:
        """Return the merged list: workers once, sums of requests, and ``routers`` with the facts of each.

        A router that fails or is silent has ``"error"`` instead of facts. Raises the first one's error if none answers.
        """
        readings = await self._read()
        errors = {address: one for address, one in readings.items() if isinstance(one, KvbatonError)}
        known = {address: one for address, one in readings.items() if not isinstance(one, KvbatonError)}
        if not known:
            raise next(iter(errors.values()))
        self._admins.sort(key=lambda admin: admin.address in errors)  # a silent one would delay an order
        first = next(iter(known.values()))
        return {
            "version": first["version"],
            "model": next((one["model"] for one in known.values() if one["model"]), None),
            **{
                name: sum(one[name] for one in known.values())
                for name in ("num_requests_waiting", "num_requests_running")
            },
            "routers": [
                *({"admin": address, **one.get("router", {})} for address, one in known.items()),
                *({"admin": address, "error": error.message} for address, error in errors.items()),
            ],
            "pools": _merged_pools([one.get("pools", {}) for one in known.values()]),
            "workers": list(merged(one["workers"] for one in known.values()).values()),
        }

    async def order(self, worker: str, verb: str, **query: float | str | None) -> dict[str, Any]:
        """Send an order; see ``RouterAdmin.order``."""
        return await order_first(self._admins, worker, verb, **query)

    async def reset_prefix_cache(self) -> list[str]:
        """Send the order to the first router that answers; each has all workers. See ``RouterAdmin.reset_prefix_cache``."""
        return await self._of_first(RouterAdmin.reset_prefix_cache)

    async def reload_weights(self, wait: float | None) -> list[str]:
        """Send the order to the first router that answers; each has all workers. See ``RouterAdmin.reload_weights``."""
        return await self._of_first(lambda router: router.reload_weights(wait))

    async def _of_first(self, order: Callable[[RouterAdmin], Awaitable[list[str]]]) -> list[str]:
        error = UnavailableError("there is no router")
        for router in self._admins:
            try:
                return await order(router)
            except UnavailableError as failed:
                error = failed
        raise error

    async def _read(self) -> dict[str, dict[str, Any] | KvbatonError]:
        """Read all routers at the same time. Once one has answered, the others have only a moment left."""
        readings: dict[str, dict[str, Any] | KvbatonError] = {
            admin.address: UnavailableError(f"router {admin.address} does not answer")
            for admin in self._admins
        }

        async def read(admin: RouterAdmin) -> bool:
            try:
                readings[admin.address] = await admin.pool()
            except KvbatonError as error:
                readings[admin.address] = error
                return False
            return True

        reads = [asyncio.create_task(read(admin)) for admin in self._admins]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    for done in asyncio.as_completed(reads):
                        if await done and limit.when() is None:
                            limit.reschedule(asyncio.get_running_loop().time() + _SILENT_SECONDS)
        finally:
            for each in reads:
                each.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        return readings


async def order_first(
    routers: Iterable[RouterAdmin], worker: str, verb: str, **query: float | str | None
) -> dict[str, Any]:
    """Send an order through the first of these routers that answers and has the worker; see ``RouterAdmin.order``.

    Raises the last error if there is none. An order that a router refuses is not tried at another one.
    """
    error: KvbatonError = UnavailableError("there is no router")
    for router in routers:
        try:
            return await router.order(worker, verb, **query)
        except (
            UnavailableError,
            NotFoundError,
        ) as failed:  # a router that has just started may not have the worker yet
            error = failed
    raise error


def merged(lists: Iterable[Sequence[Facts]]) -> dict[str, dict[str, Any]]:
    """Return each worker's facts by its id, from the lists of several routers.

    Legs and shares of credit add up. A router that has just started, or has lost a worker, does not have its state: that of
    another router counts then. A figure that is None at one router (latency, load) is that of the first router that has it.
    """
    found: dict[str, dict[str, Any]] = {}
    for workers in lists:
        for worker in workers:
            if (known := found.get(worker["id"])) is None:
                found[worker["id"]] = dict(worker)
                continue
            # Each router counts its own legs, and has a part of the worker's credit.
            for name in ("num_legs", "max_requests", "num_leg_tokens", "max_tokens"):
                known[name] += worker[name]
            known["state"] = min(known["state"], worker["state"], key=_STATES.index)
            known["num_restarts"] = max(known.get("num_restarts", 0), worker.get("num_restarts", 0))
            for name, value in worker.items():
                if known.get(name) is None:
                    known[name] = value
    return found


def _merged_pools(readings: Iterable[Mapping[str, Facts]]) -> dict[str, dict[str, Any]]:
    """Return each pool as the router with the highest pressure sees it, with the decision that any of them has."""
    found: dict[str, dict[str, Any]] = {}
    for pools in readings:
        for role, pool in pools.items():
            known = found.get(role, {})
            is_higher = pool["scaling_pressure"] > known.get("scaling_pressure", -1.0)
            found[role] = {**known, **pool} if is_higher else {**pool, **known}
    return found


def _parsed(text: str) -> dict[str, Any] | None:
    """Return a JSON object of the admin API; None for another answer."""
    try:
        reply = json.loads(text)
    except ValueError:
        return None
    # Another server may answer JSON as well; what an admin API sends has one of these fields.
    is_ours = isinstance(reply, dict) and any(
        name in reply for name in ("workers", "id", "pools", "holder", "error")
    )
    return reply if is_ours else None
