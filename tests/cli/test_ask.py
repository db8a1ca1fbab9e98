"""``kvbaton run --url`` and the demo's questions, against a small real HTTP and a small real gRPC service."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import web
from rich.console import Console

from cli.ask import TIMING_NAMES, ask_grpc, ask_http, served_model
from cli.demo import latency_table
from cli.endpoint import Endpoint
from contract.errors import KvbatonError, UnavailableError
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from serving.http_server import HttpServer, start_http

TIMINGS: dict[str, Any] = {name: 0.001 * (index + 1) for index, name in enumerate(TIMING_NAMES)}


async def chat(request: web.Request) -> web.Response:
    body = json.loads(await request.text())
    if body["model"] != "one":
        return web.json_response({"error": {"message": "there is no such model"}}, status=404)
    choice = {"message": {"content": body["messages"][0]["content"].upper()}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    return web.json_response({"choices": [choice], "usage": usage, "kvbaton": {"timings": TIMINGS}})


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "one"}]})


class Inference(inference_pb2_grpc.InferenceServicer):
    """Answers in two pieces, or refuses an empty prompt."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        if not request.text:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is empty")
        yield pb.GenerateResponse(choices=[pb.ChoiceDelta(text="one ")])
        yield pb.GenerateResponse(
            choices=[pb.ChoiceDelta(text="two", finish_reason=pb.FINISH_REASON_LENGTH)],
            usage=pb.Usage(prompt_tokens=3, completion_tokens=2),
            timings=pb.Timings(**TIMINGS),
        )


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    server = await start_http(app, "127.0.0.1:0")
    yield server
    await server.close()


@pytest.fixture
async def grpc_address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_chat_over_http_returns_its_latency_breakdown(server: HttpServer) -> None:
    endpoint = Endpoint(f"http://{server.address}")
    model = await served_model(endpoint)
    answer = await ask_http(
        endpoint, "chat/completions", {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    )
    assert (answer.text, answer.finish_reason) == ("HELLO", "stop")
    assert (answer.num_prompt_tokens, answer.num_completion_tokens) == (5, 2)
    assert answer.timings == TIMINGS


async def test_an_openai_error_is_raised_with_its_message(server: HttpServer) -> None:
    endpoint = Endpoint(f"http://{server.address}")
    with pytest.raises(KvbatonError, match="answered 404: there is no such model"):
        await ask_http(endpoint, "chat/completions", {"model": "two"})


async def test_an_unreachable_service_is_unavailable(server: HttpServer) -> None:
    await server.close()
    with pytest.raises(UnavailableError, match="does not answer as an OpenAI service"):
        await served_model(Endpoint(f"http://{server.address}"))


@pytest.mark.parametrize("reply", [[], None, {}, {"data": {}}, {"data": [1]}, {"error": "no"}, {"data": []}])
async def test_a_reply_of_another_shape_is_unavailable(reply: Any) -> None:
    async def other(_: web.Request) -> web.Response:
        return web.json_response(reply)

    app = web.Application()
    app.router.add_get("/v1/models", other)
    app.router.add_post("/v1/completions", other)
    server = await start_http(app, "127.0.0.1:0")
    try:
        with pytest.raises(UnavailableError, match=r"as an OpenAI service|serves no model yet"):
            await served_model(Endpoint(f"http://{server.address}"))
        with pytest.raises(UnavailableError, match="as an OpenAI service"):
            await ask_http(Endpoint(f"http://{server.address}"), "completions", {})
    finally:
        await server.close()


async def test_a_grpc_answer_is_assembled(grpc_address: str) -> None:
    answer = await ask_grpc(Endpoint(""), grpc_address, pb.GenerateRequest(text="count"))
    assert (answer.text, answer.finish_reason, answer.num_completion_tokens) == ("one two", "length", 2)
    assert answer.timings == pytest.approx(TIMINGS)


async def test_a_grpc_error_is_raised_with_its_details(grpc_address: str) -> None:
    with pytest.raises(UnavailableError, match="INVALID_ARGUMENT, the prompt is empty"):
        await ask_grpc(Endpoint(""), grpc_address, pb.GenerateRequest())


async def test_the_table_shows_milliseconds(grpc_address: str) -> None:
    answer = await ask_grpc(Endpoint(""), grpc_address, pb.GenerateRequest(text="count"))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(latency_table({"gRPC": answer}))
    (row,) = [line for line in capture.get().splitlines() if "gRPC" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == [
        "1.0",
        "2.0",
        "3.0",
        "4.0",
        "5.0",
        "6.0",
    ]
