"""The one way in which our processes listen for gRPC."""

import grpc.aio

from contract.errors import SettingError
from serving.settings import split_address


async def start_grpc(server: grpc.aio.Server, address: str, *, param: str) -> str:
    """Start a server on "host:port" (port 0 picks a free one); the real "host:port".

    Raises SettingError that names ``param`` when nothing can listen there.
    """
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise SettingError(f"{param} is {address}: cannot listen there, {error}", param=param) from error
    await server.start()
    return f"{split_address(address)[0]}:{port}"
