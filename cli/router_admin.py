"""Opens the admin API of the router that the settings of a command name."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from contract.addresses import local_address
from contract.errors import SettingError
from contract.identity import Role
from launch.operator_settings import OperatorSettings
from launch.router_admin import RouterAdmin, admin_session


@asynccontextmanager
async def open_admin(settings: OperatorSettings) -> AsyncIterator[RouterAdmin]:
    """Open the admin API that the settings name. Raises SettingError if they name none."""
    address = _address(settings)
    async with admin_session(settings.admin_key) as session:
        yield RouterAdmin(address, session)


def _address(settings: OperatorSettings) -> str:
    if settings.admin:
        return settings.admin
    if settings.ready_file is None:
        raise SettingError(
            "no router is named: give the address of its admin port (--admin HOST:PORT), or the ready file of"
            " `kvbaton up` (--ready-file FILE)",
            param="admin",
        )
    return _address_in(settings.ready_file)


def _address_in(ready_file: Path) -> str:
    """Return the admin address of the first router in a ready file."""
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
    return str(routers[0])
