"""The admin API for the autoscaler.

``PUT /admin/scaling`` takes a decision, which the router publishes. ``PUT /admin/scaling/lease`` decides who may scale.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from contract.decoding import decode_outside, json_decoder
from contract.errors import InvalidRequestError
from contract.scaling import ScalingLease, ScalingReport
from router.admin.admin_access import answering
from router.admin.scaling import ScalingLeases, ScalingReports
from serving.admin import json_answer

_DECODER: msgspec.json.Decoder[ScalingReport] = json_decoder(ScalingReport)
_LEASE_DECODER: msgspec.json.Decoder[ScalingLease] = json_decoder(ScalingLease)


class ScalingAdmin:
    """Serves the API on a router's admin port. pools: returns the load of each pool, with the decision about it."""

    def __init__(
        self, reports: ScalingReports, leases: ScalingLeases, pools: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._reports = reports
        self._leases = leases
        self._pools = pools

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [
            web.put("/admin/scaling", answering(self._put)),
            web.put("/admin/scaling/lease", answering(self._lease)),
        ]

    async def _put(self, request: web.Request) -> web.Response:
        """Take a report. Raises InvalidRequestError if it is none."""
        report = decode_outside(
            _DECODER.decode,
            await request.read(),
            lambda reason: InvalidRequestError(f"no decision: {reason}"),
        )
        self._reports.take(report)
        return json_answer({"pools": self._pools()})

    async def _lease(self, request: web.Request) -> web.Response:
        """Grant, prolong, refuse or take back the lease; answer with who has it. Raises InvalidRequestError."""
        wanted = decode_outside(
            _LEASE_DECODER.decode,
            await request.read(),
            lambda reason: InvalidRequestError(f"no lease: {reason}"),
        )
        return json_answer(msgspec.to_builtins(self._leases.ask(wanted)))
