"""``best_of``: the client receives those of several answers to a prompt that the model finds most likely."""

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

from msgspec import structs

from router.answers.answer import Delta


def choose_best(deltas: Sequence[Delta], num_chosen: int, num_choices: int) -> list[Delta]:
    """Choose ``num_chosen`` of every ``num_choices`` answers in a row: highest log probability per token, best first.

    All tokens have log probabilities. The usage of the other answers is added to that of the best one.
    """
    answers: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        answers[delta.index].append(delta)
    chosen = []
    for start in range(0, len(answers), num_choices):
        ranked = sorted(range(start, start + num_choices), key=lambda index: -_mean_logprob(answers[index]))
        usages = [delta.usage for index in ranked for delta in answers[index] if delta.usage]
        for rank, index in enumerate(ranked[:num_chosen]):
            place = start // num_choices * num_chosen + rank
            *earlier, last = answers[index]
            usage = last.usage if rank or not usages else sum(usages[num_chosen:], start=usages[0])
            chosen += [structs.replace(delta, index=place) for delta in earlier]
            chosen.append(structs.replace(last, index=place, usage=usage))
    return chosen


def _mean_logprob(deltas: list[Delta]) -> float:
    logprobs = [token.logprobs.logprob for delta in deltas for token in delta.tokens if token.logprobs]
    return fsum(logprobs) / len(logprobs)
