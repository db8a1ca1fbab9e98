"""Offline inference with a model on this machine, without a separate server."""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from os import PathLike, fspath
from typing import Any, Literal, Self

from contract.errors import InvalidRequestError, UnsupportedFieldError
from contract.requests import PoolingParams
from kvbaton.outputs import EmbeddingRequestOutput, RequestOutput
from kvbaton.requests import (
    Prompt,
    PromptType,
    check_all,
    check_embeddings,
    embed_all,
    parse_conversations,
    parse_prompts,
    run_all,
)
from kvbaton.sampling import SamplingParams
from kvbaton.service import LLMSettings, OfflineService
from launch.arguments import parse, to_arguments
from launch.progress import progress_bar
from router.intake.request import EmbeddingRequest, GenerationRequest
from text.chat import Chat

Sampling = SamplingParams | Sequence[SamplingParams] | None
Pooling = PoolingParams | Sequence[PoolingParams] | None
"""Parameters for all prompts, or one object per prompt."""


class LLM:
    """A model on this machine, ready when the constructor returns.

    The arguments are those of ``kvbaton up``; unset ones come from ``KVBATON_*`` variables, then the defaults. Without
    ``prefill``, ``decode`` and ``both`` there is one aggregated worker. Use it as a context manager, or ``close`` it; the
    workers end with this process at the latest. Thread-safe. Raises SettingError for an invalid argument, UnavailableError
    when a worker cannot start.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "demo",
        *,
        prefill: int | None = None,
        decode: int | None = None,
        both: int | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None,
        kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None,
        device: Literal["auto", "cpu", "cuda"] | None = None,
        transport: Literal["auto", "shm", "nixl", "nccl", "tcp"] | None = None,
        tensor_parallel_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_mixed_tokens: int | None = None,
        scheduling_policy: Literal["chunked-prefill", "prefill-first"] | None = None,
        scheduler_delay_factor: float | None = None,
        kv_cache_bytes: int | None = None,
        num_threads: int | None = None,
        log_level: Literal["debug", "info", "warning", "error"] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        arguments = to_arguments({**given, "model": fspath(model)})
        self._service = OfflineService(parse(LLMSettings, "kvbaton up", arguments))
        self._request_ids = count()
        self._close = weakref.finalize(self, self._service.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers. A second call does nothing."""
        self._close()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; return the answers in the order of the prompts.

        use_tqdm: show a progress bar if standard error is a terminal. priority: one number per prompt; higher runs earlier.
        Raises InvalidRequestError, which names the prompt, before anything is sent; KvbatonError if a prompt cannot be
        answered, which cancels the others.
        """
        return self._answer(parse_prompts(prompts), sampling_params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of conversations with the model's chat template; otherwise like ``generate``.

        tools: functions for the template, in OpenAI's format. The text of an answer includes calls and reasoning.
        """
        prompts = parse_conversations(messages, None if tools is None else list(tools))
        return self._answer(prompts, sampling_params, use_tqdm, lora_request, None)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: Pooling = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in order, from the hidden states of a prefill or aggregated worker.

        pooling_params: one for all prompts, or one for each; None: as the model's folder asks. Otherwise like ``generate``.
        """
        _refuse_lora(lora_request)
        parsed = parse_prompts(prompts)
        service = self._service
        requested = PoolingParams() if pooling_params is None else pooling_params
        params = _one_each("pooling_params", requested, len(parsed))
        each_prompt = zip(parsed, params, strict=True)
        makers = (partial(self._embedding_request, *one) for one in each_prompt)
        requests = check_embeddings(service.pipeline, makers)
        with progress_bar("Processed prompts", len(parsed), is_shown=use_tqdm) as advance:
            return service.run(lambda: embed_all(service.pipeline, requests, advance))

    def _answer(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        use_tqdm: bool,
        lora_request: object,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        _refuse_lora(lora_request)
        service = self._service
        each = len(prompts)
        params = _one_each("sampling_params", SamplingParams() if sampling is None else sampling, each)
        priorities = _one_each("priority", 0 if priority is None else priority, each)
        each_prompt = zip(prompts, params, priorities, strict=True)
        makers = (partial(self._request, *one) for one in each_prompt)
        requests = check_all(service.pipeline, service.card, makers)
        with progress_bar("Processed prompts", each, is_shown=use_tqdm) as advance:
            return service.run(lambda: run_all(service.pipeline, service.card.tokenizer, requests, advance))

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> GenerationRequest:
        name = str(next(self._request_ids))
        return params.request(name, prompt.content, priority=priority, **prompt.others)

    def _embedding_request(self, prompt: Prompt, params: PoolingParams) -> EmbeddingRequest:
        if isinstance(prompt.content, Chat):
            raise InvalidRequestError("a chat has no embedding; pass text or token ids", param="prompts")
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"pooling_params has {params!r:.60}; pass PoolingParams", param="pooling_params"
            )
        salt = prompt.others.get("cache_salt") or ""
        name = str(next(self._request_ids))
        return EmbeddingRequest(request_id=name, prompt=prompt.content, cache_salt=salt, pooling=params)


def _refuse_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise UnsupportedFieldError("lora_request is not supported by this version", param="lora_request")


def _one_each(name: str, given: Any, num_prompts: int) -> list[Any]:
    """Return one value per prompt. Raises InvalidRequestError for a list of another length."""
    if not isinstance(given, list | tuple):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequestError(
            f"{name} has {len(given)} entries for {num_prompts} prompts; pass one value, or one per prompt",
            param=name,
        )
    return list(given)
