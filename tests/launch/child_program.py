"""A small child that implements the supervisor's protocol; its first argument selects its behaviour.

well: ready, then waits for SIGTERM. fails: exits with code 3 before it is ready. loads: never becomes
ready, and ends at SIGTERM. hangs: never becomes ready, and ignores SIGTERM. stubborn: is ready, and ignores SIGTERM. drains:
works on until a second SIGTERM.
parent: like well, and has a child of its own that sleeps; its pid is in the ready line as "grandchild".
"""

import argparse
import json
import os
import signal
import subprocess
import sys

from contract.processes import die_with_parent

_BEHAVIOURS = ("well", "fails", "loads", "hangs", "stubborn", "parent", "drains")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", choices=list(_BEHAVIOURS))
    parser.add_argument("--note", default="")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--num-restarts", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent_pid)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if options.behaviour == "fails":
        sys.exit(3)
    if options.behaviour == "loads":
        signal.sigwait({signal.SIGTERM})
        return
    while options.behaviour == "hangs":
        signal.pause()
    facts = {
        "admin": f"127.0.0.1:{os.getpid()}",
        "http": "127.0.0.1:1",
        "grpc": "127.0.0.1:2",
        "note": options.note,
        "num_restarts": options.num_restarts,
    }
    if options.behaviour == "parent":
        sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        facts["grandchild"] = str(sleeper.pid)
    os.write(options.ready_fd, json.dumps(facts).encode() + b"\n")
    if options.behaviour == "stubborn":
        while True:
            signal.pause()
    signal.sigwait({signal.SIGTERM})
    if options.behaviour == "drains":
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
