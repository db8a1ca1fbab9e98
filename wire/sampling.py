"""Converts sampling parameters and grammars."""

import msgspec

from contract.decoding import converter
from contract.errors import InvalidRequestError
from contract.sampling import Grammar, SamplingParams
from protos import worker_pb2 as pb
from wire.numbers import check_numbers

_grammar = converter(Grammar)


def sampling_to_proto(sampling: SamplingParams) -> pb.EngineSampling:
    """Translate sampling parameters."""
    return pb.EngineSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        biased_token_ids=[token for token, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        grammar=None if sampling.grammar is None else grammar_to_proto(sampling.grammar),
    )


def sampling_from_proto(message: pb.EngineSampling) -> SamplingParams:
    """Translate sampling parameters. ``SamplingParams.check`` compares them with each other.

    Raises BadNumberError, and InvalidRequestError for biases without tokens or an unknown kind of grammar.
    """
    check_numbers(message)
    if len(message.biased_token_ids) != len(message.biases):
        raise InvalidRequestError(
            f"{len(message.biases)} biases are for {len(message.biased_token_ids)} tokens", param="logit_bias"
        )
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(zip(message.biased_token_ids, message.biases, strict=True)),
        allowed_token_ids=tuple(message.allowed_token_ids),
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    """Translate a grammar."""
    return pb.Grammar(kind=grammar.kind, text=grammar.text)


def grammar_from_proto(message: pb.Grammar) -> Grammar:
    """Translate a grammar. Raises InvalidRequestError for an unknown kind."""
    try:
        return _grammar({"kind": message.kind, "text": message.text})
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"unknown kind of grammar {message.kind!r}", param="grammar") from error
