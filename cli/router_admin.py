"""Opens the admin APIs of the routers that the settings of a command name."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from contract.addresses import local_address
from contract.errors import SettingError
from contract.identity import Role
from launch.operator_settings import OperatorSettings
from launch.router_admin import RouterAdmin, ServiceAdmin, admin_session
from serving.settings import listed
from worker.router_addresses import RouterAddresses


@asynccontextmanager
async def open_admin(settings: OperatorSettings) -> AsyncIterator[ServiceAdmin]:
    """Open the admin APIs that the settings name. Raises SettingError if they name none."""
    addresses = await _addresses(settings)
    async with admin_session(settings.admin_key) as session:
        yield ServiceAdmin([RouterAdmin(address, session) for address in addresses])


async def _addresses(settings: OperatorSettings) -> list[str]:
    if settings.admin:
        names = listed(settings.admin)
        # A name that cannot be resolved is kept: the connection gives the reason.
        return sorted(await RouterAddresses(names).resolve()) or list(names)
    if settings.ready_file is None:
        raise SettingError(
            "no router is named: give the address of its admin port (--admin HOST:PORT), or the ready file of"
            " `kvbaton up` (--ready-file FILE)",
            param="admin",
        )
    return _addresses_in(settings.ready_file)


def _addresses_in(ready_file: Path) -> list[str]:
    """Return the admin addresses of all routers in a ready file."""
    try:
        processes = json.loads(ready_file.read_text())["processes"]
        routers = [
            local_address(process["admin"]) for process in processes if process["role"] == Role.ROUTER.value
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SettingError(
            f"ready_file {ready_file} cannot be used: {error}; is `kvbaton up` running?", param="ready_file"
        ) from error
    if not routers:
        raise SettingError(f"ready_file {ready_file} names no running router", param="ready_file")
    return routers
