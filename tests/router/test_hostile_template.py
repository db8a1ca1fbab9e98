"""A chat template that takes too long for some conversations, in a whole router."""

import asyncio
from pathlib import Path

from tests.router.tool_cluster import CHAT, writing_cluster

BOMB = (
    "{% for m in messages %}{{ m.content }}{% if m.content == 'bomb' %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


async def test_others_are_answered_while_a_template_runs_into_its_limit(tmp_path: Path) -> None:
    """M8: a hostile template hung the router."""
    async with writing_cluster(tmp_path, "ok", template=BOMB) as cluster:
        bomb = asyncio.create_task(cluster.post(CHAT, {"messages": [{"role": "user", "content": "bomb"}]}))
        status, _ = await cluster.post("/v1/completions", {"prompt": "x"})
        assert status == 200
        assert not bomb.done()
        status, answer = await bomb
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "CPU time" in answer["error"]["message"]
        assert (await cluster.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]}))[0] == 200
