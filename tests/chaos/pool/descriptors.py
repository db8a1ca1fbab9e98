"""The descriptors of a pool's processes, by the living peer that they are for: the numbers may not grow.

A worker's links come and go with its peers, so the number of all its descriptors proves little. Here every connection to
another living process of the pool is counted apart, with all that it needs, exactly:

- a TCP connection (router stream, call, control link, ``tcp`` data): one descriptor at each end;
- a connection of the ``shm`` transport: at the reader a Unix socket, the sender's pool and table of generations, and a pidfd
  of the sender, by which it is recognized; at the sender one Unix socket.

A descriptor for a peer that is dead, or for none, is the process's own.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

Kinds = Counter[str]
"""Numbers of descriptors by kind."""
Address = tuple[str, int]
_SOCKET = "socket"
_MEMORY = "memfd"
_PIDFD = "pidfd"
_READER = {_SOCKET: 1, _MEMORY: 2, _PIDFD: 1}
"""The descriptors of a reader over ``shm`` for each sender."""
_PEER_OF_PIDFD = re.compile(r"^Pid:\s+(-?\d+)$", re.M)


def processes_of(pid: int) -> list[int]:
    """Return a process and those that it has started; empty if it is gone."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    return []


def tcp_ports_of(pids: Iterable[int]) -> set[int]:
    """Return the local ports of all open TCP connections of some processes."""
    return {port for pid in pids for (_, port), _ in _connections(pid)}


@dataclass(frozen=True)
class _Process:
    """The descriptors of one process. connections: own address and peer's, of TCP. pidfds: processes that it watches."""

    kinds: Kinds
    connections: Sequence[tuple[Address, Address]]
    pidfds: Sequence[int]

    @classmethod
    def read(cls, pid: int) -> "_Process":
        """Read it from the system; a process that is gone has nothing."""
        opened = list(_descriptors(pid))
        pidfds = [_watched_by(pid, number) for number, kind in opened if kind == _PIDFD]
        return cls(Counter(kind for _, kind in opened), list(_connections(pid)), pidfds)


def own_descriptors(pids: Mapping[str, Sequence[int]]) -> dict[str, Kinds]:
    """Return what each part of a pool has open besides its connections to the living others.

    pids: the processes of each part.
    """
    return {name: found[name] for name, found in descriptors_by_peer(pids).items()}


def descriptors_by_peer(pids: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Kinds]]:
    """Return what each part of a pool has open for each part, for itself included. pids: the processes of each part."""
    parts = {name: [_Process.read(pid) for pid in own] for name, own in pids.items()}
    part_of = {pid: name for name, own in pids.items() for pid in own}
    ends = {end: name for name, part in parts.items() for process in part for end, _ in process.connections}
    found: dict[str, dict[str, Kinds]] = {
        name: {peer: Counter() for peer in parts} | {name: sum((each.kinds for each in part), Counter())}
        for name, part in parts.items()
    }

    def move(name: str, peer: str, kinds: Mapping[str, int]) -> None:
        found[name][name].subtract(kinds)
        found[name][peer].update(kinds)

    for name, part in parts.items():
        for process in part:
            for _, end in process.connections:
                move(name, ends.get(end, name), {_SOCKET: 1})
            for watched in process.pidfds:
                sender = part_of.get(watched, name)
                if sender != name:
                    move(name, sender, _READER)
                    move(sender, name, {_SOCKET: 1})
    return found


def grown(now: Kinds, before: Kinds) -> dict[str, tuple[int, int]]:
    """Return before and now of each kind of which there is more."""
    return {kind: (before[kind], now[kind]) for kind in {*now, *before} if now[kind] > before[kind]}


def _connections(pid: int) -> Iterator[tuple[Address, Address]]:
    """Yield both addresses of each open TCP connection, the process's own first."""
    with suppress(psutil.Error):
        for each in psutil.Process(pid).net_connections(kind="tcp"):
            if each.raddr:
                yield _address(*each.laddr), _address(*each.raddr)


def _address(host: str, port: int) -> Address:
    """Return an address; IPv6 sockets write those of IPv4 in their own way."""
    return host.removeprefix("::ffff:"), port


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the numbers and kinds of a process's descriptors."""
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield each.name, _kind(str(each.readlink()))


def _kind(target: str) -> str:
    """Return the kind of a descriptor from its link: socket:[7], anon_inode:[pidfd], /memfd:name (deleted), or a path."""
    if target.startswith("/"):
        return _MEMORY if target.startswith("/memfd:") else "file"
    kind, _, rest = target.partition(":")
    return rest.strip("[]") if kind == "anon_inode" else kind


def _watched_by(pid: int, number: str) -> int:
    """Return the process that a pidfd watches, -1 if it is gone."""
    with suppress(OSError):
        found = _PEER_OF_PIDFD.search(Path(f"/proc/{pid}/fdinfo/{number}").read_text(encoding="ascii"))
        return int(found[1]) if found else -1
    return -1
