"""The outputs that a step has for the clients."""

from collections import defaultdict

from contract.errors import KvbatonError
from contract.outputs import EngineOutput, TokenLogprobs
from contract.requests import EngineRequest
from engine.connector import FirstToken
from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.stats import Totals


class Outbox:
    """Collects outputs by client index, the last one of each request exactly once, and counts them.

    is_urgent: one of them is to be sent before the next step.
    """

    def __init__(self, totals: Totals) -> None:
        self.is_urgent = False
        self._totals = totals
        self._outputs: defaultdict[int, list[EngineOutput]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._outputs)

    def add(
        self,
        request: Request,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: list[float] | None = None,
    ) -> None:
        """Add new tokens (appended to the request before) and perhaps the finish, of every choice that it stands for."""
        asked = request.asked
        output = EngineOutput(
            request_id=asked.request_id,
            attempt=asked.attempt,
            choice=asked.choice,
            first_index=request.answer_length,
            token_ids=token_ids,
            logprobs=logprobs,
            pooled=pooled,
        )
        if request.num_emitted_tokens == 0 and (token_ids or pooled):
            _add_first_report(output, request)
        request.num_emitted_tokens += len(token_ids)
        self._outputs[asked.client_index].append(output)
        self._totals.num_generated_tokens += len(token_ids)
        if finish is not None:
            request.status = finish.status
            self.is_urgent |= finish.is_handed_off
            _add_finish(output, finish)
            self._totals.num_finished += finish.error_kind is None
            self._totals.num_failed += finish.error_kind is not None
            self._totals.num_ignored += finish.status is RequestStatus.FINISHED_IGNORED
            for choice in request.asked.choices[1:]:
                self.add(request.fork(choice), [], finish)

    def add_first_token(self, request: Request, token: FirstToken, finish: Finish | None) -> None:
        """Add the first token of a request."""
        self.add(request, [token.token_id], finish, [token.logprobs] if token.logprobs else None)

    def add_rejection(self, asked: EngineRequest, error: KvbatonError) -> None:
        """Add the error of a request that was not accepted."""
        for choice in asked.choices:
            self._totals.num_failed += 1
            output = EngineOutput.of_error(
                asked.of_choice(choice), error.kind.value, error.message, error.param
            )
            self._outputs[asked.client_index].append(output)

    def take(self) -> dict[int, list[EngineOutput]]:
        """Return the outputs since the last call, in order, by client index."""
        self.is_urgent = False
        outputs = dict(self._outputs)
        self._outputs = defaultdict(list)
        return outputs


def _add_first_report(output: EngineOutput, request: Request) -> None:
    """Add what a request's first tokens, or its embedding, come with."""
    output.num_cached_tokens = request.num_cached_tokens
    output.timings = request.milestones.split()
    output.prompt_logprobs = request.prompt_logprobs.entries or None


def _add_finish(output: EngineOutput, finish: Finish) -> None:
    output.is_leg_finished = True
    output.handed_over = finish.is_handed_off
    output.finish_reason = finish.reason
    output.stop_reason = finish.stop_reason
    output.error_kind = finish.error_kind
    output.error_message = finish.error_message
    output.error_param = finish.error_param
