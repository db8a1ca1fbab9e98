"""Grammars and the field at fault over the wire between router and worker."""

import pytest

from contract.errors import InvalidRequestError
from contract.requests import EngineOutput, EngineRequest, Grammar, SamplingParams
from protos import worker_pb2 as pb
from worker.wire import entry_from_output, request_from_task


def task(grammar: pb.Grammar | None = None) -> pb.Task:
    return pb.Task(request_id="r", prompt_token_ids=[5], sampling=pb.EngineSampling(grammar=grammar))


def test_a_grammar_arrives_as_it_was_sent() -> None:
    told = request_from_task(task(grammar=pb.Grammar(kind="regex", text="é+")), None)
    assert told.sampling.grammar == Grammar("regex", "é+")
    assert request_from_task(task(), None).sampling.grammar is None


def test_a_kind_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="no grammar of kind 'xml'") as refusal:
        request_from_task(task(grammar=pb.Grammar(kind="xml")), None)
    assert refusal.value.param == "grammar"


def test_the_field_at_fault_goes_with_the_error() -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingParams())
    error = EngineOutput.of_error(request, "invalid_request", "no", "grammar")
    assert entry_from_output(error).error_param == "grammar"
    assert entry_from_output(EngineOutput(request_id="r")).error_param == ""
