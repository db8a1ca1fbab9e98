"""A counter-example as a message sequence chart in text: numbered steps with their results."""

from tests.protocol.explorer import Findings
from tests.protocol.frames import message_of
from tests.protocol.router_side import RouterSide
from tests.protocol.world import Action, World
from tests.protocol.world_rules import WorldRules

_WORDS = {
    "step": "makes a step: schedule, run, update",
    "digest": "digests a computed range and publishes it",
    "spoil": "FAULT: cannot digest a computed range",
    "commit": "makes verified blocks visible",
    "restart": "starts again under a new boot id",
    "wake": "sees that its stream is lost, aborts everything and registers again",
    "lose": "'s stream to the router is closed; the router replays its requests",
    "hear": "'s tokens or its ending reach the router",
    "crash": "FAULT: dies",
    "drain": "FAULT: drains",
    "evict": ": the time to drain is over; its legs begin again elsewhere",
    "exit": "is empty and leaves",
    "deaf": "FAULT: hangs for so long that the router gives it up",
    "starve": "FAULT: hears no heartbeat; every lease expires",
    "starve_read": "FAULT: hears no heartbeat; every lease expires, in the middle of a read",
    "expire": ": every lease that nobody renews expires",
    "late": ": what waits for KV runs into its deadline",
}
_READ = {
    "posted": "asks for the lease and begins to read",
    "copying": "has another block's bytes land",
    "copied": "asks for the lease again behind the last byte",
    "landed": "compares digests",
}


_OF_REQUESTS = {
    "doubt": ("FAULT: the attempt of", "takes too long; another one is begun"),
    "silence": ("FAULT: the target of", "is silent; another one is to continue it"),
    "leave": ("the client of", "goes away"),
    "overdue": ("the deadline of", "is over"),
    "move": ("router: a move of", "to another worker is begun"),
}


def draw(findings: Findings, rules: WorldRules) -> str:
    """Return the way to the broken law, a line for each step."""
    lines = [f"counter-example in {findings.scenario.name!r}, {len(findings.steps)} steps:"]
    for number, (world, action, after) in enumerate(findings.steps, start=1):
        lines.append(f"{number:3}. {describe(rules, world, action)}")
        if after is not None:
            lines += [f"       {line}" for line in _news(world, after)]
    return "\n".join([*lines, f"BROKEN: {findings.broken}"])


def describe(rules: WorldRules, world: World, action: Action) -> str:
    """Describe one step."""
    kind, *places = action
    if kind == "sever":
        return f"{world.workers[places[0]].boot} ← {places[1]}: FAULT: this way of reading works no more"
    if kind in ("read", "corrupt", "break"):
        index, peer = places
        reading = rules.decodes.states[world.workers[index].state or 0].lanes[peer][0]
        if kind == "break":
            return f"{world.workers[index].boot} ← {peer}: FAULT: the read for {reading.key} breaks"
        fault = "FAULT: a byte is flipped: " if kind == "corrupt" else ""
        stopped = " (it was told to stop)" if reading.read.is_stopped else ""
        return f"{world.workers[index].boot} ← {peer}: {fault}the read for {reading.key} {_READ[reading.stage]}{stopped}"
    if kind in _WORDS:
        what = _WORDS[kind]
        return world.workers[places[0]].boot + ("" if what.startswith(("'", ":")) else " ") + what
    if kind == "deliver":
        return _call(rules.routers.states[world.router], places[0])
    if kind in _OF_REQUESTS:
        (what, end) = _OF_REQUESTS[kind]
        return f"{what} request {places[0]} {end}"
    if kind == "limbo":
        receiver, sender, frame = world.limbo[places[0]]
        return f"{sender} → {receiver}: late: {_message(frame)}"
    return _on_link(world, kind, places)


def _on_link(world: World, kind: str, places: list[int]) -> str:
    link = world.links[places[0]]
    match kind:
        case "to_prefill":
            return f"{link.decode} → {link.prefill}: {_message(link.to_prefill[0])}"
        case "to_decode":
            return f"{link.prefill} → {link.decode}: {_message(link.to_decode[0])}"
        case "connect":
            return f"{link.decode} dials {link.prefill}"
        case "notice":
            side, other = (link.prefill, link.decode) if places[1] else (link.decode, link.prefill)
            return f"{side} sees that its link with {other} is gone"
        case "cut":
            return f"FAULT: the link of {link.decode} with {link.prefill} is cut"
    frame = (link.to_prefill if places[1] else link.to_decode)[0]
    return f"FAULT: on its way {'repeated' if kind == 'repeat' else 'held up'}: {_message(frame)}"


def _call(router: RouterSide, index: int) -> str:
    kind, boot, number, attempt, num_delivered, sender = router.calls[index]
    if kind in ("cancel", "hand_off"):
        next_attempt = f", for attempt {num_delivered}" if kind == "hand_off" else ""
        return f"router → {boot}: {kind} request {number}, attempt {attempt}{next_attempt}"
    source = f", KV from {sender}" if kind == "decode" and sender else ""
    behind = f", behind {num_delivered} tokens" if num_delivered else ""
    return f"router → {boot}: {kind} request {number}, attempt {attempt}{source}{behind}"


def _message(frame: bytes) -> str:
    message = message_of(frame)
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "message"}
    return f"{type(message).__name__}({', '.join(f'{name}={value}' for name, value in fields.items())})"


def _news(before: World, after: World) -> list[str]:
    news = []
    for link in after.links:
        old = next((each for each in before.links if each[:2] == link[:2]), None)
        num_prefill, num_decode = (len(old.to_prefill), len(old.to_decode)) if old else (0, 0)
        news += [f"↳ {link.decode} sends {_message(frame)}" for frame in link.to_prefill[num_prefill:]]
        news += [f"↳ {link.prefill} sends {_message(frame)}" for frame in link.to_decode[num_decode:]]
    for index, stream in enumerate(after.streams):
        for number, attempt, first, tokens, reason, error in stream[len(before.streams[index]) :]:
            what = f"token {first}: {list(tokens)}" if tokens else "no token"
            end = f", ends: {error or reason}" if reason else ""
            news.append(
                f"↳ {after.workers[index].boot} tells of request {number}, attempt {attempt}: {what}{end}"
            )
    return news
