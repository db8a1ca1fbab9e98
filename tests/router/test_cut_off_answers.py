"""An answer that its grammar cuts off has the finish reason length on each API, and no error."""

import pytest

from contract.identity import Role
from contract.outputs import FinishReason
from protos import inference_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.router.test_messages import PATH as MESSAGES
from tests.router.test_messages import SAY
from tests.router.test_responses import PATH as RESPONSES
from tests.router.test_responses import events_of
from tests.router.tool_cluster import CHAT
from tests.text.tiny_model import byte_ids

TEXT = "/v1/completions"
CUT = Script(tokens=byte_ids(b'{"a": '), finish_reason=FinishReason.GRAMMAR)
PAIR = (Role.PREFILL, Role.DECODE)


@pytest.mark.parametrize("roles", [PAIR, (Role.AGGREGATED,)])
async def test_every_api_shows_that_the_answer_is_cut_off(roles: tuple[Role, ...]) -> None:
    """C7: clients got 400, or an error event behind the text."""
    said = {"max_tokens": 50, "messages": SAY["messages"]}
    async with running_cluster(CUT, roles) as cluster, cluster.channel() as channel:
        for path, body in ((CHAT, said), (TEXT, {"prompt": "hi"})):
            status, answer = await cluster.post(path, body)
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == 6
            *_, last = [event for event in await cluster.stream(path, body) if event != "[DONE]"]
            for choice in (answer["choices"][0], last["choices"][0]):
                assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "grammar")
        _, answer = await cluster.post(MESSAGES, said)
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
        _, answer = await cluster.post(RESPONSES, {"input": "hi"})
        events = await events_of(cluster, {"input": "hi"})
        for response in (answer, events[-1]["response"]):
            ended = response["status"], response["incomplete_details"]
            assert ended == ("incomplete", {"reason": "grammar"})
        stub = cluster.inference(channel)
        once = await stub.GenerateOnce(pb.GenerateRequest(text="hi"))
        choice = once.choices[0]
        assert (choice.finish_reason, choice.stop_reason) == (pb.FINISH_REASON_LENGTH, "grammar")
