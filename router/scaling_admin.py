"""The admin API for the autoscaler: ``PUT /admin/scaling`` takes a decision, which the router publishes."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from contract.decoding import decode_outside, json_decoder
from contract.errors import InvalidRequestError
from contract.scaling import ScalingReport
from router.admin_access import AdminAccess
from router.scaling import ScalingReports

_DECODER: msgspec.json.Decoder[ScalingReport] = json_decoder(ScalingReport)


class ScalingAdmin:
    """Serves the API on a router's admin port. pools: returns the load of each pool, with the decision about it."""

    def __init__(
        self, reports: ScalingReports, access: AdminAccess, pools: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._reports = reports
        self._access = access
        self._pools = pools

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [web.put("/admin/scaling", self._access.guard(self._put))]

    async def _put(self, request: web.Request) -> web.Response:
        """Take a report. Raises InvalidRequestError if it is none."""
        report = decode_outside(
            _DECODER.decode,
            await request.read(),
            lambda reason: InvalidRequestError(f"no decision: {reason}"),
        )
        self._reports.take(report)
        return web.json_response({"pools": self._pools()})
