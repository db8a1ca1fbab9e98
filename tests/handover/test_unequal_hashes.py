"""Under which hashes a request finds and keeps its blocks, when its KV comes from an engine that computes another."""

from collections.abc import Sequence

import msgspec

from contract.cache_layout import CacheLayout
from contract.layout import KVLayout
from contract.requests import EngineRequest, ReceiveTransfer
from contract.sampling import SamplingParams
from decode_service.kv_receiver import KVReceiver
from engine.connector import Published
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.requests.request import Request
from tests.fakes.engine.transfer import FakeConnector

OURS, THEIRS = "w@float32", "w@float32 from w@bfloat16/bfloat16"
SIZE = 4
PROMPT = list(range(10))
ASKED = EngineRequest(
    request_id="r",
    prompt_token_ids=PROMPT,
    sampling=SamplingParams(),
    transfer=ReceiveTransfer("t", "p", "boot", "127.0.0.1:1"),
)


def arrived(fingerprint: str = OURS, asked: EngineRequest = ASKED) -> Request:
    return Request.from_engine_request(asked, fingerprint, SIZE)


def test_all_hashes_of_a_request_start_from_where_its_kv_came_from() -> None:
    """The prompt's and, through their parents, the answer's."""
    fetched, computed = arrived(), arrived()
    fetched.hash_from(THEIRS)
    for request in (fetched, computed):
        for token in (50, 51, 52):
            request.append_token(token)
    assert len(fetched.block_hashes) == len(computed.block_hashes) == 3
    assert not set(fetched.block_hashes) & set(computed.block_hashes)
    same = arrived(THEIRS)
    for token in (50, 51, 52):
        same.append_token(token)
    assert fetched.block_hashes == same.block_hashes


def test_salt_and_tokens_still_count() -> None:
    salted = arrived(asked=msgspec.structs.replace(ASKED, cache_salt="s"))
    fetched = arrived()
    for request in (salted, fetched):
        request.hash_from(THEIRS)
    assert not set(salted.block_hashes) & set(fetched.block_hashes)


def test_what_is_computed_here_after_a_preemption_is_hashed_so() -> None:
    """It must not be found in place of what a peer computes."""
    fetched, computed = arrived(), arrived()
    fetched.hash_from(THEIRS)
    for request in (fetched, computed):
        request.append_token(50)
        request.append_token(51)
    fetched.lose_blocks()
    assert fetched.block_hashes == computed.block_hashes
    fetched.append_token(52)
    computed.append_token(52)
    assert fetched.block_hashes == computed.block_hashes


class Peer(FakeConnector):
    """Publishes with a fingerprint, and notes how many blocks were cached."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: list[int] = []

    def publish_as(self, key: str, kv_fingerprint: str | None) -> None:
        self._events.append(Published(key, kv_fingerprint))

    def receive_into(
        self,
        key: str,
        block_ids: list[int],
        num_cached_blocks: int,
        other_groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.cached.append(num_cached_blocks)


def test_a_reservation_finds_only_blocks_of_the_kind_that_is_fetched() -> None:
    """Four requests with one prompt, whose full blocks are entered when they have arrived: computed, rounded, both again."""
    pool, peer = BlockPool(64, SIZE), Peer()
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=SIZE, dtype="float32")
    receiver = KVReceiver(peer, CachePools(CacheLayout.of(layout, [None]).groups, [pool], 64), 30.0)
    for number, origin in enumerate([None, THEIRS, None, THEIRS]):
        request = arrived(asked=msgspec.structs.replace(ASKED, request_id=f"r{number}"))
        receiver.start(request)
        peer.publish_as(request.key, origin)
        receiver.process_events()
        receiver.reserve((), None)
        pool.enter(request.key, 0, request.block_hashes)
        pool.check_integrity()
    assert peer.cached == [0, 0, 2, 2]
