"""The outputs that a step has for the clients."""

from collections import defaultdict

from contract.errors import KvbatonError
from contract.outputs import EngineOutput, TokenLogprobs
from contract.requests import EngineRequest
from engine.scheduling.requests.finish import Finish, RequestStatus
from engine.scheduling.requests.request import Request
from engine.scheduling.stats import Totals


class Outbox:
    """Collects outputs by client index, the last one of each request exactly once, and counts them.

    outputs: those since the last ``flush``. is_urgent: one of them is to be sent before the next step.
    """

    def __init__(self, totals: Totals) -> None:
        self.is_urgent = False
        self._totals = totals
        self.outputs: defaultdict[int, list[EngineOutput]] = defaultdict(list)

    def add(
        self,
        request: Request,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: list[float] | None = None,
    ) -> None:
        """Add new tokens (appended to the request before) and perhaps the finish, of every choice that it stands for."""
        engine_request = request.engine_request
        output = EngineOutput(
            request_id=engine_request.request_id,
            attempt=engine_request.attempt,
            choice=engine_request.choice,
            first_index=request.answer_length,
            token_ids=token_ids,
            logprobs=logprobs,
            pooled=pooled,
        )
        if request.answer_length == engine_request.first_index and (token_ids or pooled):
            output.num_cached_tokens = request.num_cached_tokens
            output.timings = request.milestones.split()
            output.prompt_logprobs = request.prompt_logprobs.entries or None
        request.answer_length += len(token_ids)
        self.outputs[engine_request.client_index].append(output)
        self._totals.num_generated_tokens += len(token_ids)
        if finish is not None:
            request.status = finish.status
            self.is_urgent |= finish.is_handed_off
            output.is_leg_finished = True
            output.handed_over = finish.is_handed_off
            output.finish_reason = finish.reason
            output.stop_reason = finish.stop_reason
            output.error_kind = finish.error_kind
            output.error_message = finish.error_message
            output.error_param = finish.error_param
            self._totals.num_finished += finish.error_kind is None
            self._totals.num_failed += finish.error_kind is not None
            self._totals.num_ignored += finish.status is RequestStatus.FINISHED_IGNORED
            # Its other choices have not separated yet, and get no output of their own after this one.
            for choice in request.engine_request.choices[1:]:
                self.add(request.fork(choice), [], finish)

    def add_rejection(self, engine_request: EngineRequest, error: KvbatonError) -> None:
        """Add the error of a request that was not accepted."""
        for choice in engine_request.choices:
            self._totals.num_failed += 1
            output = EngineOutput.of_error(
                engine_request.of_choice(choice), error.kind.value, error.message, error.param
            )
            self.outputs[engine_request.client_index].append(output)

    def flush(self) -> dict[int, list[EngineOutput]]:
        """Return the outputs since the last call, in order, by client index."""
        self.is_urgent = False
        outputs = dict(self.outputs)
        self.outputs = defaultdict(list)
        return outputs
