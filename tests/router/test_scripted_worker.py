"""The scripted worker answers what it is asked, or ends the request at once."""

from contract.identity import Role
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.router.tool_cluster import CHAT
from tests.text.tiny_model import byte_ids

SAY = {"messages": [{"role": "user", "content": "a prompt of more tokens than the script knows"}]}


async def test_log_probabilities_of_any_prompt() -> None:
    """A script with fewer of them than the prompt has tokens let the request wait for its deadline."""
    for given in ((), (-0.5,), tuple(-float(i) for i in range(100))):
        script = Script(tokens=byte_ids(b"ok"), prompt_logprobs=given)
        async with running_cluster(script, (Role.PREFILL, Role.DECODE)) as cluster:
            status, answer = await cluster.post(CHAT, {**SAY, "prompt_logprobs": 0})
            assert status == 200, answer
            first, *others = answer["prompt_logprobs"]
            assert first is None and len(others) == answer["usage"]["prompt_tokens"] - 1
            assert [next(iter(one.values()))["logprob"] for one in others[: len(given)]] == [
                *given[: len(others)]
            ]


async def test_a_script_that_cannot_be_played_ends_the_request() -> None:
    script = Script(tokens=[-1])
    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        status, answer = await cluster.post(CHAT, SAY)
        assert status == 500 and "cannot be played" in answer["error"]["message"]
