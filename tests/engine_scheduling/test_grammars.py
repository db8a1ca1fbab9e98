"""WAITING_FOR_FSM: who waits for a grammar holds no blocks, and whatever ends the wait leaves nothing behind."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from contract.errors import TransferError
from contract.outputs import FinishReason
from contract.requests import ReceiveTransfer, SendTransfer
from contract.sampling import Grammar
from engine.connector import FirstToken, Received
from engine.grammar.building import load_vocabulary
from engine.grammar.llguidance_matcher import build_matcher
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import PROMPT, RECEIVE, SEND, SteppedEngine, fake_request
from tests.fakes.engine.transfer import FakeConnector
from tests.text.tiny_model import END, byte_ids, write_model

WAIT_SECONDS = 240.0
WORD = Grammar("regex", "[a-f]{6}")
FSM = RequestStatus.WAITING_FOR_FSM
REMOTE = RequestStatus.WAITING_FOR_REMOTE_KVS


class Peer(FakeConnector):
    """A peer that samples a given first token."""

    first_token = byte_ids(b"a")[0]

    def pop_received(self, request_id: str) -> Received:
        """See SchedulerConnector."""
        return Received([FirstToken(self.first_token)], super().pop_received(request_id).report)


class Engine(SteppedEngine):
    """Compiles once the test lets it."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.gate, self.has_begun = threading.Event(), threading.Event()
        super().__init__(connector=Peer(), model=model, load_vocabulary=self._load, **changes)

    def _load(self, folder: Path, ends: Sequence[int]) -> LLTokenizer:
        self.has_begun.set()
        assert self.gate.wait(WAIT_SECONDS)
        return load_vocabulary(folder, ends)

    def ask(
        self,
        name: str = "r",
        grammar: Grammar = WORD,
        *,
        transfer: SendTransfer | ReceiveTransfer | None = None,
        prompt: list[int] = PROMPT,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        """Enqueue a request with a grammar; its key."""
        with_grammar = {"grammar": grammar, **(sampling or {})}
        fields = {"max_tokens": 20, "eos_token_ids": (END,), **fields}
        request = fake_request(name, prompt, transfer=transfer, sampling=with_grammar, **fields)
        self.add(request)
        return request.key

    def status(self, key: str) -> RequestStatus:
        return self.scheduler.requests[key].status

    def compile(self) -> None:
        """Let the compiler continue, wait for an outcome, and step the engine."""
        self.gate.set()
        self.until_woken()
        self.step()

    def until_woken(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.woken.acquire(timeout=WAIT_SECONDS)

    def until_heard(self, *keys: str) -> None:
        """Run, and wait for the compiler, until these have been answered."""
        self.run()
        while not all(key in self.outputs for key in keys):
            self.until_woken()
            self.run()

    def arrive(self, key: str) -> None:
        """Let the KV of a request arrive: published, reserved, landed, processed."""
        self.connector.publish_peer(key)
        self.step()
        self.connector.land(key)
        self.step()

    def text(self, key: str) -> str:
        """The answer, its end token left out."""
        return bytes(token - 5 for token in self.tokens(key) if token != END).decode()

    def assert_empty(self) -> None:
        """Assert that no request waits and no block is held."""
        for key in [key for key, send in self.connector.sends.items() if send.end]:
            self.connector.end_lease(key)
        self.run()
        assert self.scheduler.requests == {}
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    made = Engine(model)
    yield made
    made.gate.set()
    made.core.close()


def test_it_waits_without_blocks_then_matches(engine: Engine) -> None:
    key = engine.ask()
    engine.add(fake_request("plain", PROMPT, 2))
    engine.run()
    assert len(engine.tokens("plain#0.0")) == 2, "others go on"
    assert engine.status(key) is FSM and engine.pool.num_blocks_of(key) == 0
    assert engine.request_counts() == (0, 1) and not engine.core.needs_step()
    engine.compile()
    engine.run()
    assert engine.tokens(key)[-1] == END and engine.end(key).finish_reason is FinishReason.STOP
    assert len(engine.text(key)) == 6 and set(engine.text(key)) <= set("abcdef")
    engine.assert_empty()


def test_what_was_prepared_needs_no_compilation_when_the_request_comes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moved answer comes with more tokens than it was prepared with. It does not wait for compilations either."""
    over: list[str] = []
    asked = fake_request(
        "r", [*PROMPT, *byte_ids(b"ab")], 20, first_index=2, eos_token_ids=(END,), sampling={"grammar": WORD}
    )
    engine.core.prepare(asked, lambda: over.append("prepared"))
    assert not over and not engine.scheduler.requests
    engine.gate.set()
    engine.until_woken()
    assert over == ["prepared"] and not engine.core.needs_step()

    may_compile = threading.Event()

    def compile_later(*args: Any) -> LLMatcher:
        assert may_compile.wait(WAIT_SECONDS)
        return build_matcher(*args)

    monkeypatch.setattr("engine.grammar.building.build_matcher", compile_later)
    others = [engine.ask(f"other-{number}", Grammar("regex", f"[a-f]{{{number}}}")) for number in (2, 3, 4)]
    moved = engine.ask(prompt=[*PROMPT, *byte_ids(b"abc")], first_index=3)
    engine.until_heard(moved)
    assert engine.end(moved).finish_reason is FinishReason.STOP and len(engine.text(moved)) == 3
    assert all(engine.status(key) is FSM for key in others)
    may_compile.set()
    engine.until_heard(*others)
    while engine.scheduler.requests:
        engine.run()
    engine.assert_empty()


def test_masks_come_with_the_steps_that_draw(engine: Engine) -> None:
    """B17: at each request's row; a chunk that is not the prompt's last draws nothing; the fake runner asserts the rest."""
    engine.gate.set()
    plain = fake_request("plain", [7] * 3, 8)
    engine.add(plain)
    key = engine.ask(prompt=[1, 2] * 18, max_tokens=3)
    engine.until_woken()
    seen = []
    for _ in range(4):
        output = engine.scheduler.schedule()
        engine.scheduler.update_from_output(output, engine.executor.execute_model(output))
        seen.append((output.num_scheduled_tokens, output.structured_output_request_ids))
    assert [rows for _, rows in seen] == [{}, {key: 0}, {key: 0}, {key: 0}]
    assert seen[0][0][key] < 36 and all(plain.key in scheduled for scheduled, _ in seen)
    assert output.grammar_bitmask is not None and output.grammar_bitmask.shape == (1, 32)


def test_prefill_leg_waits_and_its_first_token_matches(engine: Engine) -> None:
    key = engine.ask(transfer=SEND)
    engine.run()
    assert engine.status(key) is FSM and engine.connector.sends == {}
    engine.compile()
    engine.run()
    assert engine.text(key) in set("abcdef") and engine.end(key).finish_reason is None
    engine.assert_empty()


def test_prefill_leg_whose_answer_is_complete_at_its_first_token_needs_no_decode_leg(engine: Engine) -> None:
    key = engine.ask(grammar=Grammar("regex", "[ab]"), transfer=SEND, sampling={"ignore_eos": True})
    engine.compile()
    engine.run()
    assert engine.end(key).finish_reason is FinishReason.STOP and len(engine.tokens(key)) == 1
    assert engine.connector.sends[key].end == "not_needed"
    engine.assert_empty()


@pytest.mark.parametrize("is_kv_first", [True, False], ids=["KV first", "grammar first"])
def test_decode_leg_needs_both(engine: Engine, is_kv_first: bool) -> None:
    """In either order; its matcher has taken the first token, so five letters and the end are left."""
    key = engine.ask(transfer=RECEIVE)
    engine.step()
    assert engine.status(key) is REMOTE and key in engine.connector.fetches
    if is_kv_first:
        engine.arrive(key)
        assert engine.status(key) is FSM and engine.pool.num_blocks_of(key) == 3
        engine.run()
        assert engine.tokens(key) == [] and not engine.core.needs_step()
        engine.compile()
    else:
        engine.compile()
        assert engine.status(key) is REMOTE and engine.pool.num_blocks_of(key) == 0
        engine.arrive(key)
    engine.run()
    assert len(engine.text(key)) == 5 and engine.tokens(key)[-1] == END
    engine.assert_empty()


@pytest.mark.parametrize("is_kv_first", [True, False], ids=["KV first", "grammar first"])
def test_first_token_that_does_not_match_is_refused(engine: Engine, is_kv_first: bool) -> None:
    """Two workers with unlike grammars: an error, never a text that does not match."""
    engine.connector.first_token = byte_ids(b"z")[0]  # type: ignore[attr-defined]
    key = engine.ask(transfer=RECEIVE)
    engine.step()
    if is_kv_first:
        engine.arrive(key)
        engine.compile()
    else:
        engine.compile()
        engine.arrive(key)
    end = engine.end(key)
    assert (end.error_kind, end.token_ids) == ("internal", [])
    assert "does not match the grammar" in (end.error_message or "")
    engine.assert_empty()


def test_replay_goes_on_behind_the_delivered_tokens(engine: Engine) -> None:
    """On both paths: as many letters as were left."""
    delivered = byte_ids(b"fed")
    fields: dict[str, Any] = {"prompt": [*PROMPT, *delivered], "attempt": 1}
    alone = engine.ask("alone", first_index=3, **fields)
    behind = engine.ask("behind", transfer=RECEIVE, first_index=4, **fields)
    engine.gate.set()
    engine.step()
    engine.arrive(behind)
    engine.until_heard(alone, behind)
    assert len(engine.text(alone)) == 3 and len(engine.text(behind)) == 2
    engine.assert_empty()


def test_preemption_keeps_the_state(model: Path) -> None:
    """Two answers in a pool for one and a half: both match, and both are what they are without preemption."""
    texts = []
    for num_blocks in (64, 9):
        engine = Engine(model, kv_cache_bytes=num_blocks, enable_prefix_caching=False)
        engine.gate.set()
        keys = [engine.ask(name, Grammar("regex", "[a-z]{15}")) for name in ("one", "two")]
        engine.until_woken(2)
        engine.run()
        texts.append([engine.text(key) for key in keys])
        assert (engine.scheduler.totals.num_preemptions > 0) is (num_blocks == 9)
        engine.assert_empty()
        engine.core.close()
    assert texts[0] == texts[1] and {len(text) for text in texts[0]} == {15}


def test_what_does_not_compile_ends_its_request_alone(engine: Engine) -> None:
    bad, good = engine.ask("bad", Grammar("regex", "(a")), engine.ask("good")
    remote = engine.ask("remote", Grammar("regex", "(a"), transfer=RECEIVE)
    engine.gate.set()
    engine.until_heard(bad, good, remote)
    for key in (bad, remote):
        end = engine.end(key)
        assert (end.error_kind, end.error_param) == ("invalid_request", "grammar")
        assert "unclosed group" in (end.error_message or "")
    assert len(engine.text(good)) == 6 and engine.connector.fetches == {}
    engine.assert_empty()


@pytest.mark.parametrize("state", ["waiting", "prefill leg", "asked", "arrived"])
@pytest.mark.parametrize("end", ["abort", "own deadline", "compile time", "shutdown"])
def test_every_end_while_it_compiles(engine: Engine, state: str, end: str) -> None:
    """Each request ends once, with its error if there is one; a later outcome of the compilation is dropped."""
    transfer = {"waiting": None, "prefill leg": SEND}.get(state, RECEIVE)
    key = engine.ask(transfer=transfer, deadline_seconds=5.0 if end == "own deadline" else 100.0)
    assert engine.has_begun.wait(WAIT_SECONDS)
    engine.step()
    if state == "arrived":
        engine.arrive(key)
    assert engine.status(key) is (REMOTE if state == "asked" else FSM)
    if end == "abort":
        engine.core.abort([key])
    elif end == "shutdown":
        for outputs in engine.scheduler.shutdown().values():
            assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    else:
        engine.now = 5.0 if end == "own deadline" else 10.0
        assert engine.core.seconds_to_deadline() == 0.0 or state == "asked"
    engine.step()
    if state == "asked" and end == "compile time":
        assert engine.status(key) is REMOTE, "it has its KV to wait for; that wait has its own limit"
        engine.core.abort([key])
        engine.step()
    elif end == "own deadline":
        assert engine.end(key).error_kind == "deadline"
    elif end == "compile time":
        assert engine.end(key).error_kind == "invalid_request"
        assert "not compiled within 10 s" in (engine.end(key).error_message or "")
    engine.gate.set()
    engine.until_woken()
    engine.assert_empty()


def test_a_request_that_waited_for_other_grammars_may_try_again(engine: Engine) -> None:
    """Two threads: the third one's turn has not come when its time is over."""
    third = [engine.ask(name, Grammar("regex", name)) for name in ("one", "two", "three")][-1]
    engine.now = 10.0
    engine.step()
    assert engine.end(third).error_kind == "overloaded"
    assert "turn has not come" in (engine.end(third).error_message or "")


def test_a_key_that_lives_again_gets_its_own_matcher(engine: Engine) -> None:
    """The outcome for the first life comes while the second one waits."""
    key = engine.ask(grammar=Grammar("regex", "a{3}"))
    assert engine.has_begun.wait(WAIT_SECONDS)
    engine.core.abort([key])
    engine.step()
    assert engine.ask(grammar=Grammar("regex", "b{4}")) == key
    engine.outputs.clear()
    engine.gate.set()
    engine.until_heard(key)
    assert engine.text(key) == "bbbb"


def test_grammar_that_is_too_long_for_this_worker(model: Path) -> None:
    engine = Engine(model, max_grammar_bytes=8)
    key = engine.ask(grammar=Grammar("regex", "é" * 5), transfer=RECEIVE)
    engine.run()
    end = engine.end(key)
    assert (end.error_kind, end.error_param) == ("invalid_request", "grammar")
    assert "10 bytes" in (end.error_message or "") and "8 at most" in (end.error_message or "")
    assert engine.connector.fetches == {}


def test_refused_fetch_leaves_no_wait(engine: Engine) -> None:
    """The connector rejects the peer: no trace of the request is left."""
    engine.connector.refusal = TransferError("by the test")
    key = engine.ask(transfer=RECEIVE)
    engine.run()
    assert engine.end(key).error_kind == "transfer_failed"
    engine.assert_empty()
