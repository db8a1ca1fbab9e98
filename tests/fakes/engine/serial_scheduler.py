"""A second scheduler behind the same interface, which shares no code with the first: one request at a time, in order."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from contract.errors import ErrorKind, KvbatonError
from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest
from engine.outputs import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.scheduling.interface import SchedulerInterface
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.stats import SchedulerStats


class SerialScheduler(SchedulerInterface):
    """Computes the first request from its prompt to its last token, then the next one. It always uses the same blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._block_ids = list(range(1, num_blocks))
        self._queue: dict[str, EngineRequest] = {}
        self._tokens: dict[str, list[int]] = {}
        self._finished: set[str] = set()
        self._outputs: defaultdict[int, list[EngineOutput]] = defaultdict(list)

    def schedule(self) -> SchedulerOutput:
        output = SchedulerOutput(finished_req_ids=self._finished)
        self._finished = set()
        for key, request in list(self._queue.items())[:1]:
            prompt = request.prompt_token_ids
            known = self._tokens.get(key)
            if known is None:
                self._tokens[key] = []
                output.scheduled_new_reqs.append(
                    NewRequestData(
                        key, prompt, request.sampling, (self._block_ids,), 0, len(prompt), eos_token_ids=()
                    )
                )
            else:
                computed = len(prompt) + len(known) - 1
                output.scheduled_cached_reqs = CachedRequestData([key], [False], [[]], [([],)], [computed])
            output.num_scheduled_tokens[key] = len(prompt) if known is None else 1
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, list[EngineOutput]]:
        for key, sampled in zip(runner_output.req_ids, runner_output.sampled_token_ids, strict=True):
            request = self._queue.get(key)
            if request is None:
                continue
            tokens = self._tokens[key]
            output = EngineOutput(
                request_id=request.request_id, first_index=len(tokens), token_ids=list(sampled)
            )
            tokens += sampled
            if len(tokens) == request.sampling.max_tokens:
                self._end(key, output, FinishReason.LENGTH)
            else:
                self._outputs[request.client_index].append(output)
        return self._flush()

    def add_request(self, engine_request: EngineRequest) -> None:
        self._queue[engine_request.key] = engine_request

    def reject(self, engine_request: EngineRequest, error: KvbatonError) -> None:
        output = EngineOutput.of_error(engine_request, error.kind.value, error.message, error.param)
        self._outputs[engine_request.client_index].append(output)

    def finish_requests(self, keys: str | Iterable[str], status: RequestStatus) -> None:
        for key in [keys] if isinstance(keys, str) else list(keys):
            if key in self._queue:
                self._end(key, EngineOutput(request_id=self._queue[key].request_id), FinishReason.ABORT)

    def abort_request(self, request_id: str, attempt: int | None, choice: int | None = None) -> None:
        keys = [key for key, request in self._queue.items() if request.request_id == request_id]
        self.finish_requests(keys, RequestStatus.FINISHED_ABORTED)

    def fail_all(self, kind: ErrorKind, message: str) -> dict[int, list[EngineOutput]]:
        return self.shutdown()

    def shutdown(self) -> dict[int, list[EngineOutput]]:
        self.finish_requests(list(self._queue), RequestStatus.FINISHED_ABORTED)
        return self._flush()

    def get_request_counts(self) -> tuple[int, int]:
        return min(1, len(self._queue)), max(0, len(self._queue) - 1)

    def has_finished_requests(self) -> bool:
        return bool(self._finished)

    def make_stats(self) -> SchedulerStats:
        running, waiting = self.get_request_counts()
        return SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting)

    def counters(self) -> dict[str, float]:
        return {}

    def debug_state(self) -> dict[str, Any]:
        return {"requests": list(self._queue)}

    def check_integrity(self) -> None:
        assert self._queue.keys() >= self._tokens.keys()

    def reset_prefix_cache(self, model_fingerprint: str | None = None) -> bool:
        return True

    def needs_step(self) -> bool:
        return self.has_requests() or bool(self._outputs)

    def is_decode_only(self) -> bool:
        return len(self._queue) == 1 and bool(self._tokens)

    def has_room(self) -> bool:
        return not self._queue

    def is_free(self) -> bool:
        return not (self._queue or self._outputs)

    def flush_urgent(self) -> dict[int, list[EngineOutput]]:
        return {}

    def _end(self, key: str, output: EngineOutput, reason: FinishReason) -> None:
        request = self._queue.pop(key)
        if self._tokens.pop(key, None) is not None:
            self._finished.add(key)
        output.is_leg_finished = True
        output.finish_reason = reason
        self._outputs[request.client_index].append(output)

    def _flush(self) -> dict[int, list[EngineOutput]]:
        outputs = dict(self._outputs)
        self._outputs.clear()
        return outputs
