"""Weights that are read again while the engine runs: what must hold before, what changes, and an error in between."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from contract.block_hash import full_block_hashes, root_hash
from contract.errors import InternalError, InvalidRequestError, SettingError
from contract.layout import model_fingerprint
from engine.compute.forward import ForwardPass, forward_pass
from engine.core import EngineCore, reload_weights
from engine.executor import Executor, InProcessExecutor
from engine.kv_cache.startup import initialize_kv_cache
from engine.models.checkpoint import check_same_model, describe_model
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.scheduler import Scheduler
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint, replace_weights
from tests.engine_scheduling.stepping import PROMPT, SEND, SteppedEngine, fake_request


@contextmanager
def running_core(
    folder: Path, make_forward: Callable[..., ForwardPass] = forward_pass
) -> Iterator[EngineCore]:
    def start(settings: EngineSettings) -> tuple[Executor, int]:
        executor = InProcessExecutor(settings, make_forward=make_forward)
        return executor, initialize_kv_cache(executor)[0]

    settings = EngineSettings(model=folder, dtype="float32", kv_cache_bytes=2**20, num_threads=1)
    core = EngineCore(settings, start=start)
    yield core
    core.close()


def test_nothing_but_the_fingerprint_changes(tmp_path: Path) -> None:
    """B16: also for the hashes of new requests. Requests that wait or run are refused, and one that has ended is not."""
    folder = make_checkpoint(tmp_path / "model")
    with running_core(folder) as core:
        before = core.info
        request = fake_request("a", list(range(40)), max_tokens=9)
        core.add_request(request)
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="have not finished"):
                reload_weights(core)
            core.step()
        core.scheduler.finish_requests(request.key, RequestStatus.FINISHED_ABORTED)
        replace_weights(folder, 5)
        fingerprint = model_fingerprint(folder, "float32")
        assert reload_weights(core) == fingerprint != before.model_fingerprint
        assert core.info == structs.replace(before, model_fingerprint=fingerprint)
        core.add_request(request)
        (added,) = core.scheduler.schedule().scheduled_new_reqs
        assert added.num_computed_tokens == 0
        assert isinstance(core.scheduler, Scheduler)
        hashes = core.scheduler.requests[request.key].block_hashes
        assert hashes == full_block_hashes(root_hash(fingerprint), request.prompt_token_ids, 16)


def test_kv_that_is_lent_keeps_its_weights_and_peers_get_the_new_fingerprint() -> None:
    """B16: a peer may still read what is lent; later it may pair only by the new fingerprint (law 7)."""
    engine = SteppedEngine()
    engine.add(fake_request("p", PROMPT, transfer=SEND))
    with pytest.raises(InvalidRequestError, match="have not finished"):
        reload_weights(engine.core)
    engine.run()
    with pytest.raises(InvalidRequestError, match="transfers hold blocks"):
        reload_weights(engine.core)
    engine.connector.end_lease("p#0.0")
    engine.run()
    fingerprint = reload_weights(engine.core)
    assert (
        engine.connector.model_fingerprint == engine.core.info.model_fingerprint == fingerprint != "fake:fake"
    )


def test_an_error_in_the_middle_is_the_end_of_the_engine(tmp_path: Path) -> None:
    """B16: it computes nothing with half of the weights, and can still be closed."""
    made: list[ForwardPass] = []

    def make_forward(*args: Any) -> ForwardPass:
        if made:
            raise SettingError("no room", param="device")
        made.append(forward_pass(*args))
        return made[0]

    with running_core(make_checkpoint(tmp_path / "model"), make_forward) as core:
        with pytest.raises(
            InternalError, match="could not be reloaded, and the former ones are freed: no room"
        ):
            reload_weights(core)
        with pytest.raises(InternalError, match="before load_model"):
            core.executor.collective_rpc("get_model_info")


def test_a_reload_needs_the_same_model(tmp_path: Path) -> None:
    """B16: other weights, and a note about the program that has written them, make no other model."""
    same = describe_model(make_checkpoint(tmp_path / "a", seed=1))
    config = (tmp_path / "a" / "config.json").read_text()
    (tmp_path / "a" / "config.json").write_text(config.replace("{", '{"_name_or_path": "here",', 1))
    check_same_model(same, describe_model(tmp_path / "a"))
    check_same_model(same, describe_model(make_checkpoint(tmp_path / "b", seed=2)))
    others: list[tuple[dict[str, Any], str]] = [
        ({"rope_theta": 5.0}, "rope"),
        ({"vocab_size": 300}, "vocab_size of config.json was 264 when the model was loaded and is 300"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ]
    for number, (overrides, words) in enumerate(others):
        other = make_checkpoint(tmp_path / str(number), seed=1, **overrides)
        with pytest.raises(SettingError, match=words) as caught:
            check_same_model(same, describe_model(other))
        assert caught.value.param == "model"
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    with pytest.raises(
        SettingError, match=r"the digest of tokenizer.json was '\w+' when the model was loaded"
    ):
        check_same_model(same, describe_model(tmp_path / "a"))
    extra = {**same, "tensor x": ([1], "F32")}
    for loaded, found in ((same, extra), (extra, same)):
        with pytest.raises(SettingError, match=r"tensor x was .* and is"):
            check_same_model(loaded, found)
