"""Starts gRPC servers."""

import grpc
import grpc.aio

from contract.addresses import join_address, split_address
from contract.errors import SettingError


async def start_grpc(
    server: grpc.aio.Server, address: str, *, param: str, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Start a server on "host:port" (port 0 picks a free one), with TLS if ``credentials`` are given; return its address.

    Raises SettingError that names ``param`` when the address cannot be bound.
    """
    try:
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise SettingError(f"{param} is {address}: cannot listen there, {error}", param=param) from error
    await server.start()
    return join_address(split_address(address)[0], port)
