"""A prefill worker in a process of its own, without torch; its commands are JSON lines on standard input.

Commands: {"do": "open", "name", "num_tokens"}, {"do": "publish", "num_tokens"}, {"do": "finish"}, {"do": "wait_sent"}.
Each is answered by one JSON line; the first line has the worker's address.
"""

import json
import sys
from functools import partial
from operator import contains
from typing import Any

from contract.identity import Role
from contract.layout import Side
from contract.requests import EngineRequest, SendTransfer
from engine.connector import FirstToken
from kv_transfer.connector import TransferFactory
from tests.kv_transfer.builders import LAYOUT, MODEL, block_content, request_of, settings_for
from tests.kv_transfer.fakes import ByteMemory, TransferDriver


def say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = settings_for("p", Role.PREFILL, peer_timeout_seconds=float(sys.argv[1]), transport=sys.argv[2])
    driver = TransferDriver(ByteMemory(LAYOUT, 64))
    driver.attach(TransferFactory(settings)(Side(LAYOUT), MODEL, driver.wake))
    say(address=driver.address, boot_id=settings.boot_id, torch="torch" in sys.modules)
    request: EngineRequest | None = None
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "open":
                tokens = list(range(command["num_tokens"]))
                request = request_of(command["name"], tokens, SendTransfer(f"t-{command['name']}"))
                blocks = list(range(5, 5 + -(-len(tokens) // LAYOUT.block_size)))
                for index, block_id in enumerate(blocks):
                    driver.memory.fill(block_id, block_content(f"t-{command['name']}", index))
                driver.sender.open_send(request, blocks, 0)
            case "publish" if request is not None:
                driver.sender.publish(request.key, command["num_tokens"])
                driver.step()
            case "finish" if request is not None:
                driver.sender.finish_send(request.key, [FirstToken(42)])
            case "wait_sent" if request is not None:
                driver.wait_for(partial(contains, driver.sent, request.key), "sent")
        say(done=command["do"], sent=driver.sent)
    driver.close()


main()
