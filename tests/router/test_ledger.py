"""Who counts as what while the router holds a request."""

from contract.requests import FinishReason
from router.answer import Delta, Usage
from router.attempt import LegReport
from router.ledger import Ledger
from router.metrics import RouterMetrics
from router.request import GenerationRequest


def test_an_answer_that_its_client_still_reads_neither_waits_nor_runs() -> None:
    ledger = Ledger(1, RouterMetrics())
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=0, num_cached_tokens=0)
    with ledger.open(GenerationRequest(request_id="a", prompt="x")) as record:
        assert (ledger.num_waiting, ledger.num_running) == (1, 0)
        record.bound()
        assert (ledger.num_waiting, ledger.num_running) == (1, 0)
        record.finish(Delta(), FinishReason.STOP, usage, LegReport())
        assert (ledger.num_waiting, ledger.num_running) == (0, 0)
        assert ledger.num_by_state()["finished"] == 1
