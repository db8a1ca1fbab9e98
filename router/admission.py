"""Who may wait for workers: a bound on the queue, and a share of it for each client. Pure."""

from collections.abc import Mapping


def has_slot(num_waiting: Mapping[str, int], tenant: str, max_queue: int, num_more: int = 1) -> bool:
    """Return whether ``num_more`` requests of ``tenant`` may wait, as if they came one after the other.

    num_waiting: requests that wait, by client. The queue is ``max_queue`` long. When it is full, a client that holds less
    than its share (``max_queue`` divided by the clients that wait) is still admitted: another one holds more than its own.
    So at most ``2 * max_queue`` requests wait, and no client is kept out by the others.
    """
    if sum(num_waiting.values()) + num_more <= max_queue:
        return True
    clients = {name for name, count in num_waiting.items() if count} | {tenant}
    return len(clients) > 1 and num_waiting.get(tenant, 0) + num_more <= max_queue // len(clients)
