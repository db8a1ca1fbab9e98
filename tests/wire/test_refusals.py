"""The codec refuses messages that make no sense, and gives absent fields their meaning."""

from collections.abc import Callable
from typing import Any

import pytest

from contract.errors import InternalError, InvalidRequestError
from contract.membership import Registration
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, PoolingParams, ReceiveTransfer, SendTransfer
from contract.sampling import Grammar, SamplingParams
from protos import worker_pb2 as pb
from wire.legs import (
    cancel_from_proto,
    decode_from_proto,
    decode_to_proto,
    embed_from_proto,
    embed_to_proto,
    hand_off_from_proto,
    prefill_from_proto,
    prefill_to_proto,
    sampling_from_proto,
    task_from_proto,
)
from wire.messages import from_proto
from wire.tokens import output_from_proto, output_to_proto, step_to_proto


def task(grammar: pb.Grammar | None = None) -> pb.Task:
    return pb.Task(request_id="r", prompt_token_ids=[5], sampling=pb.EngineSampling(grammar=grammar))


def request(transfer: SendTransfer | ReceiveTransfer | None = None) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=[5], sampling=SamplingParams(top_k=3), transfer=transfer
    )


def test_a_grammar_arrives_as_it_was_sent() -> None:
    told = task_from_proto(task(grammar=pb.Grammar(kind="regex", text="é+")))
    assert told.sampling.grammar == Grammar("regex", "é+")
    assert task_from_proto(task()).sampling.grammar is None


def test_a_kind_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="unknown kind of grammar 'xml'") as refusal:
        task_from_proto(task(grammar=pb.Grammar(kind="xml")))
    assert refusal.value.param == "grammar"


def test_the_field_at_fault_goes_with_the_error() -> None:
    error = EngineOutput.of_error(request(), "invalid_request", "no", "grammar")
    assert output_to_proto(error).error_param == "grammar"
    assert output_to_proto(EngineOutput(request_id="r")).error_param == ""


@pytest.mark.parametrize("bad", [pb.Task(request_id="r"), pb.Task(prompt_token_ids=[5]), pb.Task()])
def test_a_task_without_id_or_prompt_is_refused(bad: pb.Task) -> None:
    reads: list[Callable[[], EngineRequest]] = [
        lambda: task_from_proto(bad),
        lambda: prefill_from_proto(pb.PrefillRequest(task=bad, transfer_id="t")),
        lambda: decode_from_proto(pb.DecodeRequest(task=bad)),
        lambda: embed_from_proto(pb.EmbedLegRequest(task=bad)),
    ]
    for read in reads:
        with pytest.raises(InvalidRequestError, match="a task needs a request id and a prompt"):
            read()


def test_a_prefill_leg_without_a_name_for_its_hand_over_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a prefill leg needs a transfer_id"):
        prefill_from_proto(pb.PrefillRequest(task=task()))


@pytest.mark.parametrize("field", ["transfer_id", "control_address"])
def test_an_incomplete_source_is_refused(field: str) -> None:
    source = pb.TransferSource(transfer_id="t", worker_id="p", boot_id="b", control_address="h:1")
    source.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="needs a transfer_id and a control_address"):
        decode_from_proto(pb.DecodeRequest(task=task(), source=source))


def test_a_source_that_is_there_and_empty_is_no_missing_source() -> None:
    with pytest.raises(InvalidRequestError, match="needs a transfer_id"):
        decode_from_proto(pb.DecodeRequest(task=task(), source=pb.TransferSource()))
    assert decode_from_proto(pb.DecodeRequest(task=task())).transfer is None


def test_a_bias_without_its_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="1 biases are for 2 tokens"):
        sampling_from_proto(pb.EngineSampling(biased_token_ids=[1, 2], biases=[0.5]))


def test_what_a_task_leaves_out_changes_nothing() -> None:
    told = task_from_proto(pb.Task(request_id="r", prompt_token_ids=[5]))
    assert (told.num_choices, told.sampling.repetition_penalty) == (1, 1.0)
    assert (told.sampling.logprobs, told.sampling.prompt_logprobs) == (None, None)


def test_zero_is_not_left_out() -> None:
    sampling = pb.EngineSampling(logprobs=0, prompt_logprobs=0, repetition_penalty=0.0)
    told = sampling_from_proto(sampling)
    assert (told.logprobs, told.prompt_logprobs, told.repetition_penalty) == (0, 0, 0.0)
    output = output_from_proto(pb.TokenEntry(stop_reason=0, num_cached_tokens=0, timings=pb.LegTimings()))
    assert (output.stop_reason, output.num_cached_tokens) == (0, 0)
    assert output.timings is not None
    assert cancel_from_proto(pb.CancelRequest(request_id="r", choice=0)) == ("r", 0, 0)
    assert cancel_from_proto(pb.CancelRequest(request_id="r")) == ("r", 0, None)


def test_an_embeddings_sampling_is_neither_sent_nor_read() -> None:
    pooling = PoolingParams("mean")
    asked = EngineRequest(
        request_id="r", prompt_token_ids=[5], sampling=SamplingParams(top_k=3), pooling_params=pooling
    )
    assert not embed_to_proto(asked).task.HasField("sampling")
    hostile = pb.EmbedLegRequest(task=task(grammar=pb.Grammar(kind="xml")), pooling_type="mean")
    told = embed_from_proto(hostile)
    assert (told.sampling, told.pooling_params) == (SamplingParams(), pooling)


def test_a_leg_is_only_sent_with_the_transfer_that_it_is_for() -> None:
    source = ReceiveTransfer(transfer_id="t", peer_worker_id="p", peer_boot_id="b", peer_control="h:1")
    for transfer in (None, source):
        with pytest.raises(TypeError, match="a prefill leg has a SendTransfer"):
            prefill_to_proto(request(transfer))
    with pytest.raises(TypeError, match="a decode leg has a ReceiveTransfer or none"):
        decode_to_proto(request(SendTransfer("t")))


def test_empty_and_none_are_one_on_the_wire() -> None:
    empty = EngineOutput(request_id="r", logprobs=[], prompt_logprobs=[], pooled=[], error_message="")
    assert output_to_proto(empty) == output_to_proto(EngineOutput(request_id="r"))
    assert output_from_proto(output_to_proto(empty)) == EngineOutput(request_id="r")


def test_that_a_leg_is_finished_stays_with_the_worker() -> None:
    output = EngineOutput(request_id="r", is_leg_finished=True)
    assert not output_from_proto(output_to_proto(output)).is_leg_finished


def test_a_finish_reason_that_is_not_known_is_no_output() -> None:
    with pytest.raises(InternalError, match="'tired' is no finish reason"):
        output_from_proto(pb.TokenEntry(finish_reason="tired"))


def test_a_step_without_a_load_says_nothing_of_it() -> None:
    assert not step_to_proto([EngineOutput(request_id="r")], None).HasField("load")


def test_an_empty_registration_lacks_everything() -> None:
    assert from_proto(Registration, pb.Registration()) == Registration()
    with pytest.raises(InvalidRequestError, match=r"KvLayout\.num_kv_heads is 0; it must lie in 1"):
        from_proto(Registration, pb.Registration(kv_layout=pb.KvLayout()))


@pytest.mark.parametrize(
    "bad", [{"transfer_id": ""}, {"next_attempt": 1}, {"next_attempt": 0}], ids=lambda bad: next(iter(bad))
)
def test_a_hand_off_to_no_newer_attempt_or_without_a_transfer_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="a hand-off needs"):
        hand_off_from_proto(
            pb.HandOffRequest(
                **{"request_id": "r", "attempt": 1, "next_attempt": 2, "transfer_id": "t", **bad}
            )
        )
