"""Blocks that were computed before their transfer was opened are published when the next pass begins, not when it ends."""

import pytest

from tests.kv_transfer.builders import TOKENS, pair_of, prompt_of

NUM_BLOCKS = 13
SOURCE_IDS, TARGET_IDS = list(range(1, 1 + NUM_BLOCKS)), list(range(40, 40 + NUM_BLOCKS))
OTHER_IDS = list(range(20, 20 + NUM_BLOCKS))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_they_have_arrived_before_another_prompt_of_the_same_pass_is_computed(transport: str) -> None:
    with pair_of(transport=transport) as pair:
        prompt, driver, decode = prompt_of(NUM_BLOCKS), pair.prefill.driver, pair.decode.driver
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        other = pair.send_request("other", prompt)
        arrived: list[str] = []

        def compute_layer(number: int) -> None:
            if number == 1:
                driver.sender.finish_send(send.key, TOKENS)
                decode.receiver.start_fetch(fetch)
                decode.wait_for(lambda: decode.published, "the announcement")
                decode.receiver.receive_into(fetch.key, TARGET_IDS, 0)
                decode.wait_for(lambda: decode.received, "the blocks that were there")
                arrived.extend(decode.received)

        driver.compute_layer = compute_layer
        pair.prefill.lend("t-r", SOURCE_IDS)
        driver.sender.open_send(send, SOURCE_IDS, len(prompt))
        driver.sender.open_send(other, OTHER_IDS, 0)
        driver.sender.publish(other.key, len(prompt))
        driver.step()
        assert arrived == [fetch.key]
        assert pair.decode.holds("t-r", TARGET_IDS)
        assert decode.receiver.pop_received(fetch.key).report.num_pieces == 1
