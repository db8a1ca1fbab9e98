"""One API key learns nothing of another one's prompts, and takes nothing from it."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.identity import Role
from router.intake.limits import TenantRules, tenant_salt
from router.intake.prepared_request import PreparedRequest
from router.intake.request import BACKGROUND_PRIORITY
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_admission_queue import grant_one
from tests.router.test_ends import TEXT, TOKENS

KEYS = "alice-secret-key,bob-secret-key"
text = st.text(st.characters(codec="utf-8"), max_size=12)


async def salt_of(cluster: Cluster, path: str, body: dict[str, Any], key: str | None) -> str:
    """Return the cache salt that the workers receive."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, answer = await cluster.post(path, body, headers=headers)
    assert status == 200, answer
    workers = cluster.workers.values()
    tasks = [call.task for worker in workers for call in worker.received.prefills]
    tasks += [call.task for worker in workers for call in worker.received.embeds]
    return tasks[-1].cache_salt


async def test_keys_do_not_share_cached_prompts() -> None:
    """M6: ``cached_tokens`` and the time to the first token therefore reveal nothing of another key's prompts."""
    async with running_cluster(Script(tokens=TOKENS), (Role.PREFILL, Role.DECODE), api_keys=KEYS) as cluster:
        for path, body in ((TEXT, {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
            alice, bob = [
                await salt_of(cluster, path, body, f"{name}-secret-key") for name in ("alice", "bob")
            ]
            assert alice != bob
            assert alice == await salt_of(cluster, path, body, "alice-secret-key"), "it reuses its own"
            own = await salt_of(cluster, path, {**body, "cache_salt": "s"}, "alice-secret-key")
            assert own not in (alice, bob, "s"), "its own salt still separates"
            stolen = await salt_of(cluster, path, {**body, "cache_salt": alice}, "bob-secret-key")
            assert stolen not in (alice, bob)


async def test_a_setting_shares_the_cache_and_without_keys_it_is_shared() -> None:
    """M6: as before."""
    body = {"prompt": "x", "cache_salt": "s"}
    shared: dict[str, Any] = {"api_keys": KEYS, "shared_prefix_cache": True}
    async with running_cluster(Script(tokens=TOKENS), **shared) as cluster:
        assert await salt_of(cluster, TEXT, body, "alice-secret-key") == "s"
    async with running_cluster(Script(tokens=TOKENS)) as cluster:
        assert await salt_of(cluster, TEXT, body, None) == "s"


@given(text, text, text, text)
def test_no_two_tenants_and_salts_have_one_salt(tenant: str, salt: str, other: str, other_salt: str) -> None:
    """M6: the encoding is unambiguous, wherever the border between the two lies."""
    assert (tenant_salt(tenant, salt) == tenant_salt(other, other_salt)) == (
        (tenant, salt) == (other, other_salt)
    )
    assert tenant_salt(tenant + "a", salt) != tenant_salt(tenant, "a" + salt)


@given(st.integers(BACKGROUND_PRIORITY, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_priority_counts_up_to_the_limit(priority: int, limit: int) -> None:
    """M3: the highest priority that a client gets is the operator's choice."""
    request = PreparedRequest(
        request_id="a", prompt_token_ids=[1], priority=priority, cache_salt="", arrival=0.0, deadline=1.0
    )
    assert TenantRules(max_priority=limit).apply(request).priority == min(priority, limit)


@pytest.mark.parametrize(
    ("sent", "counts"), [(-5, 5), (5, -5), (0, 0), (-200, 100), (BACKGROUND_PRIORITY,) * 2]
)
def test_lower_priorities_go_first_if_the_operator_says_so(sent: int, counts: int) -> None:
    """The requests of batches stay last."""
    request = PreparedRequest(
        request_id="a", prompt_token_ids=[1], priority=sent, cache_salt="", arrival=0.0, deadline=1.0
    )
    assert TenantRules(is_lower_first=True).apply(request).priority == counts


@pytest.mark.parametrize("order", ["higher-first", "lower-first"])
async def test_workers_get_priorities_in_the_order_of_the_setting(order: str) -> None:
    async with running_cluster(Script(tokens=TOKENS), (Role.AGGREGATED,), priority_order=order) as cluster:
        for key in ("", "sk"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            await cluster.post(TEXT, {"prompt": "x", "priority": 7}, headers=headers)
        found = {call.task.priority for call in cluster.workers["both-0"].received.decodes}
    assert found == {7 if order == "higher-first" else -7}


async def test_a_flood_of_the_highest_priority_does_not_starve_others() -> None:
    """M3: an ordinary request is answered while another client's urgent ones keep coming."""
    async with running_cluster(Script(tokens=TOKENS), (Role.AGGREGATED,), max_queue=200) as cluster:
        await grant_one(cluster, "both-0")
        is_over = False

        async def hog() -> int:
            count = 0
            while not is_over:
                status, _ = await cluster.post(TEXT, {"prompt": "x", "priority": 2**31 - 1})
                assert status == 200
                count += 1
            return count

        hogs = [asyncio.create_task(hog()) for _ in range(20)]
        await cluster.until(lambda state: state["num_in_line"] >= 10)
        async with asyncio.timeout(20):
            assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200
        is_over = True
        assert sum(await asyncio.gather(*hogs)) <= 20 * 10
        assert max(call.task.priority for call in cluster.workers["both-0"].received.decodes) == 100
