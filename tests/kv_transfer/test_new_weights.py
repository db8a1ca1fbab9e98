"""B16, law 7: workers whose weights were reloaded shake hands again, so that no KV of other weights is handed over."""

from tests.kv_transfer.builders import MODEL, Pair, Worker, hand_over, pair_of, prompt_of


def load_weights(worker: Worker, model: str) -> None:
    """Give a worker other weights, and wait until its links are closed."""
    worker.driver.scheduler.set_model_fingerprint(model)
    worker.driver.wait_for(lambda: not worker.driver.scheduler.debug_state()["links"]["peers"], "closed")


def failure_of(pair: Pair, name: str) -> str:
    fetch, decode = pair.fetch_request(name, prompt_of(2)), pair.decode.driver
    decode.receiver.start_fetch(fetch)
    decode.wait_for(lambda: fetch.key in decode.failed, "failed")
    return decode.failed[fetch.key].message


def test_links_are_opened_again_with_the_new_fingerprint() -> None:
    """While only one side has other weights, nothing is handed over, whichever side that is."""
    with pair_of() as pair:
        hand_over(pair, "before")
        load_weights(pair.prefill, "new")
        load_weights(pair.decode, MODEL)
        assert f"model_fingerprint: ours is new, the peer's is {MODEL}" in failure_of(pair, "one")
        load_weights(pair.decode, "new")
        hand_over(pair, "after")
        load_weights(pair.prefill, MODEL)
        load_weights(pair.decode, "new")
        assert f"model_fingerprint: ours is {MODEL}, the peer's is new" in failure_of(pair, "other")
