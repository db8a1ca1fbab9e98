"""The sources and the terms of the linked peers."""

import logging
from dataclasses import dataclass

from kv_transfer.links.link import PeerRef
from kv_transfer.protocol.events import RetryStep
from kv_transfer.protocol.plan import PeerTerms
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.choosing import Alternatives

logger = logging.getLogger(__name__)


@dataclass
class _Peer:
    source: Source
    terms: PeerTerms | None


class PeerSources:
    """Owns the source and the terms of each linked peer; ``alternatives`` has their other sources. Not thread-safe."""

    def __init__(self, alternatives: Alternatives) -> None:
        self.alternatives = alternatives
        self._peers: dict[PeerRef, _Peer] = {}

    def add(self, ref: PeerRef, source: Source, terms: PeerTerms | None) -> None:
        """Record a new link. terms: None if the peer's blocks are ours, one for one."""
        self._peers[ref] = _Peer(source, terms)
        if terms is not None:
            converted = terms.plan.describe() or "nothing"
            text = "KV from worker %s (model %s): converting %s"
            logger.info(text, source.worker_id, terms.model_fingerprint, converted)

    def remove(self, ref: PeerRef) -> Source | None:
        """Remove a link; return where the peer was read."""
        peer = self._peers.pop(ref, None)
        return None if peer is None else peer.source

    def source_of(self, ref: PeerRef) -> Source:
        """Return where a linked peer is read."""
        return self._peers[ref].source

    def terms_of(self, ref: PeerRef) -> PeerTerms | None:
        """Return a peer's terms, or None if it has none or no link."""
        peer = self._peers.get(ref)
        return None if peer is None else peer.terms

    def has_link(self, ref: PeerRef, source: Source) -> bool:
        """Return whether the peer's link is the one that ``source`` belongs to."""
        peer = self._peers.get(ref)
        return peer is not None and peer.source.token == source.token

    def replace(self, ref: PeerRef, provisional: Source, chosen: Source) -> bool:
        """Read the peer from ``chosen``, if it is still read from ``provisional``; return whether it was."""
        peer = self._peers.get(ref)
        if peer is None or peer.source != provisional:
            return False
        peer.source = chosen
        return True

    def retries(self, ref: PeerRef, failed: Source | None) -> tuple[tuple[RetryStep, ...], Source | None]:
        """Return how a failed read can be retried, best first, and the other source. No way if the link is gone."""
        if failed is None or not self.has_link(ref, failed):
            return (), None
        other = self.alternatives.beside(failed)
        return ((RetryStep.SAME_TRANSPORT,) if other is None else tuple(RetryStep)), other

    def mark_failed(self, ref: PeerRef, source: Source) -> None:
        """Record that a transfer's read from ``source`` failed, which may change where the peer is read."""
        next_source = self.alternatives.failed(source)
        if ref in self._peers:
            self._peers[ref].source = next_source
