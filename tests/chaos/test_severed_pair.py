"""The only pair of workers is severed while both live: the decode worker computes prompts, and clients get no error."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.chaos.proxy import FaultyLink, every, none
from tests.chaos.settings import chaos_rng
from tests.chaos.under_fault import PEER_TIMEOUT, Scene, scene_behind_a_link

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Scene, FaultyLink]]:
    """One pair for all faults: each leaves it whole."""
    async with scene_behind_a_link(tmp_path_factory.mktemp("pair"), chaos_rng("severed pair")) as pair:
        yield pair


async def reject(link: FaultyLink) -> None:
    """Reset every connection, and further ones too."""
    link.control.refuses = every
    link.control.cut()
    await asyncio.sleep(5 * PEER_TIMEOUT)
    link.control.refuses = none


async def drop(link: FaultyLink) -> None:
    """Let nothing pass, in both directions."""
    link.control.hold()
    await asyncio.sleep(5 * PEER_TIMEOUT)
    link.control.release()


async def drop_answers(link: FaultyLink) -> None:
    """Drop what the prefill worker sends, but not what it receives."""
    link.control.lets_answers_pass.clear()
    await asyncio.sleep(5 * PEER_TIMEOUT)
    link.control.lets_answers_pass.set()


@pytest.mark.parametrize("fault", [reject, drop, drop_answers])
async def test_severing_the_only_pair_loses_no_answer(
    pair: tuple[Scene, FaultyLink], fault: Callable[[FaultyLink], Awaitable[None]]
) -> None:
    """P6: reset, dropped, dropped one way; during transfers and before later ones."""
    scene, link = pair
    outcome = await scene.during(lambda: fault(link))
    assert (outcome.wrong, outcome.errors) == ([], [])
    assert outcome.num_whole > 0
    await scene.until_calm(2)
