"""Hand-overs between two workers of one process, over real sockets (tcp) and by copies (local)."""

from functools import partial

import msgspec
import pytest

from contract.outputs import TokenLogprobs, TransferReport
from engine.connector import FirstToken
from kv_transfer.protocol.orders import TransferMetadata
from tests.kv_transfer.builders import LAYOUT, TOKENS, Pair, Sides, hand_over, pair_of, prompt_of
from tests.kv_transfer.fakes import CorruptingReceiver

BOTH = pytest.mark.parametrize("transport", ["tcp", "shm", "nixl", "nccl"])
NUM_BLOCKS = 5


@BOTH
def test_chunks_cross_while_later_ones_are_computed(transport: str) -> None:
    """Range 1 has landed before range 2 is published; the partly filled last block comes with the whole prompt (B19)."""
    crossed = f"transfer_blocks_total{{transport={transport}}}"
    with pair_of(transport=transport) as pair:
        prompt, source, target = prompt_of(4, num_last=2), [3, 9, 5, 1], [50, 20, 40, 30]
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        prefill, decode = pair.prefill.driver, pair.decode.driver
        pair.prefill.lend("t-r", source)
        decode.receiver.start_fetch(fetch)
        prefill.sender.open_send(send, source, 0)
        prefill.sender.publish(send.key, 7)
        prefill.step()
        decode.wait_for(lambda: decode.published == [fetch.key], "published")
        decode.receiver.receive_into(fetch.key, target, 0)
        decode.wait_for(lambda: pair.decode.count(crossed) == 1, "chunk 1")
        prefill.sender.publish(send.key, 13)
        prefill.step()
        decode.wait_for(lambda: pair.decode.count(crossed) == 3, "chunk 2")
        assert decode.received == []
        prefill.sender.publish(send.key, len(prompt))
        prefill.step()
        logprobs = TokenLogprobs(42, -0.5, 1, (42, 7), (-0.5, -1.5))
        prefill.sender.finish_send(send.key, [FirstToken(42, logprobs), FirstToken(7)])
        decode.wait_for(lambda: decode.received == [fetch.key], "received")
        received = decode.receiver.pop_received(fetch.key)
        assert received.first_tokens == [FirstToken(42, logprobs), FirstToken(7)]
        assert received.report.num_bytes == 4 * LAYOUT.block_bytes
        assert received.report.hidden_seconds > 0
        assert received.report.num_pieces >= 2
        assert received.report.copying_seconds >= received.report.hidden_seconds
        assert received.report.waiting_seconds > 0
        assert received.report.exposed_seconds >= 0
        assert pair.decode.holds("t-r", target)
        assert decode.memory.committed == target
        prefill.wait_for(lambda: prefill.sent == [send.key], "sent")
        assert decode.published == [fetch.key]
        assert pair.prefill.count("leases_active") == 0
        check_histograms(pair, received.report)


def check_histograms(pair: Pair, report: TransferReport) -> None:
    """Assert that one transfer and one lease are counted, each in the bucket of its value and all above."""
    seconds = report.exposed_seconds + report.hidden_seconds
    values = {
        "transfer_seconds": seconds,
        "transfer_exposed_seconds": report.exposed_seconds,
        "transfer_size_bytes": report.num_bytes,
    }
    for name, value in values.items():
        assert pair.decode.count(f"{name}_count") == pair.decode.count(f"{name}_bucket{{le=+Inf}}") == 1
        assert pair.decode.count(f"{name}_sum") == value
    size = pair.decode.driver.scheduler.counters()
    assert size["transfer_size_bytes_bucket{le=4096.0}"] == (report.num_bytes <= 4096)
    assert size["transfer_size_bytes_bucket{le=16384.0}"] == 1
    assert pair.prefill.count("lease_age_seconds_count") == 1
    assert pair.decode.count("lease_age_seconds_count") == 0


@BOTH
def test_only_missing_blocks_cross(transport: str) -> None:
    """Blocks that the receiver's prefix cache holds are neither moved nor touched."""
    with pair_of(transport=transport) as pair:
        prompt, source, target = prompt_of(NUM_BLOCKS), list(range(5)), list(range(10, 15))
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        decode = pair.decode.driver
        pair.prefill.lend("t-r", source)
        pair.prefill.driver.send_all(send, source, TOKENS)
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.published, "published")
        decode.receiver.receive_into(fetch.key, target, 3)
        decode.wait_for(lambda: decode.received, "received")
        assert decode.receiver.pop_received(fetch.key).report.num_bytes == 2 * LAYOUT.block_bytes
        assert pair.decode.count(f"transfer_blocks_total{{transport={transport}}}") == 2
        assert pair.decode.count(f"transfer_bytes_total{{transport={transport}}}") == 2 * LAYOUT.block_bytes
        assert pair.decode.holds("t-r", target, first=3)
        assert decode.memory.committed == target[3:]
        assert not any(decode.memory.read_view(target[2]))


def test_a_fully_cached_prompt_moves_nothing() -> None:
    with pair_of() as pair:
        prompt, source = prompt_of(2), [0, 1]
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        decode, prefill = pair.decode.driver, pair.prefill.driver
        prefill.send_all(send, source, TOKENS)
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.published, "published")
        decode.receiver.receive_into(fetch.key, [7, 8], 2)
        decode.wait_for(lambda: decode.received, "received")
        assert decode.receiver.pop_received(fetch.key).report.num_bytes == 0
        prefill.wait_for(lambda: prefill.sent, "sent")


def test_blocks_that_the_sender_had_cached_are_published_with_the_next_step() -> None:
    """Publishing happens in ``execute`` only; the orders are plain data, and an idle core has work because of them (B19)."""
    with pair_of() as pair:
        prompt, source = prompt_of(3), [0, 1, 2]
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        decode, prefill = pair.decode.driver, pair.prefill.driver
        prefill.sender.open_send(send, source, 9)
        assert prefill.scheduler.has_work()
        metadata = prefill.scheduler.build_metadata()
        assert isinstance(metadata, TransferMetadata)
        assert [order.block_ids for order in metadata.orders] == [[0, 1]]
        assert not prefill.scheduler.has_work()
        assert prefill.scheduler.build_metadata() is None
        decode.receiver.start_fetch(fetch)
        wire = msgspec.msgpack.encode(metadata)
        prefill.rank.execute(msgspec.msgpack.decode(wire, type=TransferMetadata))
        decode.wait_for(lambda: decode.published, "published")


@pytest.mark.parametrize("block_index", range(NUM_BLOCKS))
def test_a_block_overwritten_before_verification_fails_the_transfer(block_index: int) -> None:
    """Whichever block is damaged, again and again: it is named, nothing is committed, and the sender's lease ends."""
    decorate = partial(CorruptingReceiver, block_index=block_index)
    with pair_of(Sides(decode={"decorate": decorate})) as pair:
        prompt, source, target = prompt_of(NUM_BLOCKS, num_last=1), list(range(5)), list(range(10, 15))
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        decode, prefill = pair.decode.driver, pair.prefill.driver
        pair.prefill.lend("t-r", source)
        prefill.send_all(send, source, TOKENS)
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.published, "published")
        decode.receiver.receive_into(fetch.key, target, 0)
        decode.wait_for(lambda: decode.failed or decode.received, "an end")
        assert decode.received == []
        assert decode.failed[fetch.key].kind == "transfer_failed"
        assert f"block {block_index} of transfer t-r" in decode.failed[fetch.key].message
        assert decode.memory.committed == []
        assert pair.decode.count("transfer_digest_mismatches_total") == 2
        assert pair.decode.count("transfer_pulled_again_total{rung=same_transport}") == 1
        assert pair.decode.count("transfer_failures_total{kind=transfer_failed}") == 1
        prefill.wait_for(lambda: prefill.sent == [send.key], "sent")


@pytest.mark.parametrize("difference", ["tokens", "salt"])
def test_right_bytes_of_a_wrong_prompt_fail(difference: str) -> None:
    """The digest is seeded with the block's canonical hash (law 3)."""
    with pair_of() as pair:
        prompt, source = prompt_of(2), [0, 1]
        other = [*prompt[:-1], 99] if difference == "tokens" else prompt
        fetch = pair.fetch_request("r", other)
        if difference == "salt":
            fetch = type(fetch)(
                request_id="r",
                prompt_token_ids=prompt,
                sampling=fetch.sampling,
                transfer=fetch.transfer,
                cache_salt="s",
            )
        decode = pair.decode.driver
        pair.prefill.driver.send_all(pair.send_request("r", prompt), source, TOKENS)
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.published, "published")
        decode.receiver.receive_into(fetch.key, [7, 8], 0)
        decode.wait_for(lambda: decode.failed, "failed")
        wrong = 1 if difference == "tokens" else 0
        assert f"block {wrong} of transfer t-r" in decode.failed[fetch.key].message


def test_a_sender_with_another_number_of_blocks_is_refused() -> None:
    with pair_of() as pair:
        pair.prefill.driver.send_all(pair.send_request("r", prompt_of(2)), [0, 1], TOKENS)
        fetch, decode = pair.fetch_request("r", prompt_of(3)), pair.decode.driver
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.failed, "failed")
        assert "ended with 2 blocks" in decode.failed[fetch.key].message


@BOTH
def test_many_transfers_share_one_link(transport: str) -> None:
    """Twelve at once, in both orders of the legs; every block arrives where it belongs."""
    names = [f"r{number}" for number in range(12)]
    with pair_of(transport=transport) as pair:
        decode, prefill = pair.decode.driver, pair.prefill.driver
        prompt = prompt_of(3)
        blocks = {name: list(range(number * 3, number * 3 + 3)) for number, name in enumerate(names)}
        for number, name in enumerate(names):
            send, fetch = pair.send_request(name, prompt), pair.fetch_request(name, prompt)
            pair.prefill.lend(f"t-{name}", blocks[name])
            if number % 2:
                decode.receiver.start_fetch(fetch)
            prefill.send_all(send, blocks[name], TOKENS)
            if not number % 2:
                decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: len(decode.published) == len(names), "all published")
        for name in names:
            decode.receiver.receive_into(f"{name}#0.0", blocks[name][::-1], 0)
        decode.wait_for(lambda: len(decode.received) == len(names), "all received")
        for name in names:
            assert decode.receiver.pop_received(f"{name}#0.0").report.num_bytes == 3 * LAYOUT.block_bytes
            assert pair.decode.holds(f"t-{name}", blocks[name][::-1])
        prefill.wait_for(lambda: len(prefill.sent) == len(names), "all sent")
        assert pair.decode.count("link_handshakes_total{result=ok}") == 1
        assert len(decode.scheduler.debug_state()["links"]["peers"]) == 1
        assert sorted(prefill.sent) == sorted({*prefill.sent})


def test_one_worker_may_hold_both_roles_towards_another() -> None:
    """Two workers fetch from each other at the same time: one link each way."""
    with pair_of() as pair:
        hand_over(pair, "there")
        back = type(pair)(prefill=pair.decode, decode=pair.prefill)
        hand_over(back, "back")
        assert back.decode.count("transfer_blocks_total{transport=tcp}") == 3


def test_debug_state_names_what_is_going_on() -> None:
    with pair_of() as pair:
        pair.prefill.driver.sender.open_send(pair.send_request("r", prompt_of(2)), [0, 1], 0)
        decode = pair.decode.driver
        decode.receiver.start_fetch(pair.fetch_request("r", prompt_of(2)))
        (lease,) = pair.prefill.driver.scheduler.debug_state()["leases"]
        assert (lease["transfer_id"], lease["attempt"], lease["state"]) == ("t-r", 0, "open")
        assert lease["age_seconds"] >= 0
        (fetch,) = decode.scheduler.debug_state()["fetches"]
        assert (fetch["request"], fetch["state"]) == ("r#0.0", "waiting")
        assert fetch["age_seconds"] >= 0
