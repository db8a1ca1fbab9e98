"""The default addresses of the public ports (law 8)."""

import pytest

from launch.command_settings import settings_class
from serving.settings import Settings

_PORTS = ("http", "grpc", "internal", "admin")


@pytest.mark.parametrize("name", ["router", "up", "serve", "run", "chat", "demo"])
def test_public_ports_bind_to_loopback_by_default(name: str) -> None:
    settings: type[Settings] = settings_class(name)
    defaults = {port: settings.model_fields[port].default for port in _PORTS if port in settings.model_fields}
    assert {"http", "grpc"} <= set(defaults)
    assert {address.rpartition(":")[0] for address in defaults.values()} == {"127.0.0.1"}
