"""The memory of the compiled grammars that running requests follow."""

import threading
from weakref import WeakSet

from contract.errors import OverloadedError
from engine.grammar.limits import HEAVY_BYTES, MAX_HEAVY_BYTES
from engine.grammar.machine import Machine


class LiveMachines:
    """Counts the bytes of all machines that are in memory, for whatever reason. Thread-safe.

    max_bytes: above this, no new grammar is compiled.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._machines: WeakSet[Machine] = WeakSet()

    def add(self, machine: Machine) -> None:
        """Add a machine; it is removed when its last user is."""
        with self._lock:
            self._machines.add(machine)

    def check_room(self) -> None:
        """Raise OverloadedError while the machines take all the memory that grammars may have."""
        with self._lock:
            num_bytes = sum(machine.num_bytes for machine in self._machines)
        if num_bytes > self._max_bytes:
            raise OverloadedError(
                f"the grammars of running requests take {num_bytes} bytes, of {self._max_bytes}: try again"
            )

    def check_heavy(self, machine: Machine) -> None:
        """Raise OverloadedError for a large machine while other large ones are in use: a client may send many at once."""
        if machine.num_built_bytes < HEAVY_BYTES:
            return
        with self._lock:
            others = [one for one in self._machines if one is not machine and len(one.users)]
        num_bytes = sum(one.num_built_bytes for one in others if one.num_built_bytes >= HEAVY_BYTES)
        if num_bytes + machine.num_built_bytes > MAX_HEAVY_BYTES:
            raise OverloadedError(
                f"the grammar takes {machine.num_built_bytes} bytes, and other large ones of running requests "
                f"{num_bytes}, of {MAX_HEAVY_BYTES} together: try again, or make it simpler"
            )
