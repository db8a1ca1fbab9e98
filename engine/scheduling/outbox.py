"""What the clients must hear after this step, and what the runner must be told."""

from collections import defaultdict

from contract.errors import KvbatonError
from contract.outputs import EngineOutput, TokenLogprobs
from contract.requests import EngineRequest
from engine.connector import FirstToken
from engine.scheduling.ending import Ending
from engine.scheduling.request import Request
from engine.scheduling.stats import Totals


class Outbox:
    """Collects outputs by client index, each request's last one exactly once, and counts them."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._outputs: defaultdict[int, list[EngineOutput]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._outputs)

    def tokens(
        self,
        request: Request,
        token_ids: list[int],
        ending: Ending | None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: list[float] | None = None,
    ) -> None:
        """The request has new tokens and perhaps ends with them: every choice that it still stands for."""
        self._outputs[request.client_index].append(request.emit(token_ids, ending, logprobs, pooled))
        self._totals.num_generated_tokens += len(token_ids)
        if ending is not None:
            self._totals.num_finished += ending.error_kind is None
            self._totals.num_failed += ending.error_kind is not None
            for choice in request.asked.choices[1:]:
                self.tokens(request.fork(choice), [], ending)

    def first_token(self, request: Request, token: FirstToken, ending: Ending | None) -> None:
        """The request has its first token."""
        self.tokens(request, [token.token_id], ending, [token.logprobs] if token.logprobs else None)

    def refusal(self, asked: EngineRequest, error: KvbatonError) -> None:
        """The request was not accepted."""
        for choice in asked.choices:
            self._totals.num_failed += 1
            output = EngineOutput.of_error(
                asked.of_choice(choice), error.kind.value, error.message, error.param
            )
            self._outputs[asked.client_index].append(output)

    def take(self) -> dict[int, list[EngineOutput]]:
        """Everything since the last call, in order."""
        outputs = dict(self._outputs)
        self._outputs = defaultdict(list)
        return outputs
