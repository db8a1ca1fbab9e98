"""A counter-example in a world of several routers, in text: numbered steps, and the frames and calls that each sends."""

from typing import Any

from tests.protocol.explorer import Findings
from tests.protocol.routers.world import RoutersWorld
from tests.protocol.world import Action

_OF_WORKERS = {
    "step": "makes a step",
    "restart": "starts again under a new boot id",
    "crash": "FAULT: dies",
    "divide": "FAULT: divides its credit again",
    "drain": "FAULT: begins to drain",
    "undrain": "serves again",
    "settle": "takes its next step between settled and unsettled",
    "digest": "publishes what it lends",
    "commit": "commits what it has read",
    "read": "goes on with a read",
    "expire": "lets its deadlines pass",
    "late": "waits for KV no longer",
}
_OF_ROUTERS = {"restart_router": "starts again", "crash_router": "FAULT: dies"}
_OF_SESSIONS = {
    "to_router": "a frame arrives at the router",
    "to_worker": "a frame arrives at the worker",
    "cut": "FAULT: the stream is cut",
}

_OF_LINKS = {
    "connect": "it is dialed",
    "to_prefill": "a frame arrives at the lender",
    "to_decode": "a frame arrives at the reader",
    "notice": "a side detects its end",
    "cut_link": "FAULT: it is cut",
}


def draw(findings: Findings) -> str:
    """Return the way to the broken law, a line for each step."""
    lines = [f"counter-example in {findings.scenario.name!r}, {len(findings.steps)} steps:"]
    for number, (before, action, after) in enumerate(findings.steps, start=1):
        world: RoutersWorld = before  # type: ignore[assignment]
        lines.append(f"{number:3}. {describe(world, action)}")
        if after is not None:
            known = set(_sent(world))
            lines += [f"       ↳ {sent}" for sent in _sent(after) if sent not in known]  # type: ignore[arg-type]
    return "\n".join([*lines, f"BROKEN: {findings.broken}"])


def _sent(world: RoutersWorld) -> list[str]:
    """Return the calls and orders that are on their way, in text."""
    orders = [f"{session.name}: {order}" for session in world.sessions for order in session.orders]
    return [*map(str, world.calls), *orders]


def describe(world: RoutersWorld, action: Action) -> str:
    """Describe one step."""
    kind, *places = action
    for texts, part in ((_OF_WORKERS, "workers"), (_OF_ROUTERS, "routers")):
        if kind in texts:
            return f"{getattr(world, part)[places[0]].boot} {texts[kind]}"
    if kind in _OF_SESSIONS:
        return f"{world.sessions[places[0]].name}: {_OF_SESSIONS[kind]}"
    if kind in _OF_LINKS:
        link = world.links[places[0]]
        return f"the link of {link.decode} to {link.prefill}: {_OF_LINKS[kind]}"
    return _describe_event(world, kind, places)


def _order(world: RoutersWorld, places: list[Any]) -> str:
    session = world.sessions[places[0]]
    return f"{session.name}: {session.orders[places[1]]}"


def _describe_event(world: RoutersWorld, kind: str, places: list[Any]) -> str:
    match kind:
        case "move":
            return f"{world.routers[places[0]].boot} orders that request {places[1]} is moved"
        case "detect":
            return (
                f"{world.sessions[places[0]].name}: the {'router' if places[1] else 'worker'} detects its end"
            )
        case "attach":
            return f"{world.workers[places[1]].boot} attaches to {world.routers[places[0]].boot}"
        case "deliver":
            return f"arrives: {world.calls[places[0]]}"
        case "slow":
            return f"FAULT: its router waits no longer for: {_order(world, places)}"
        case "order":
            return f"arrives: {_order(world, places)}"
        case "divide_all":
            return "all workers divide their credit again"
    end = "the client goes away" if kind == "leave" else "the deadline is over"
    return f"{world.routers[places[0]].boot}: {end} of request {places[1]}"
