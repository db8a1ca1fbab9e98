"""Decides which changes of roles leave a worker for each role that requests need: pure functions."""

from collections.abc import Iterable

from contract.identity import Role


def missing_roles(roles: Iterable[Role], *, embeds_only: bool) -> frozenset[Role]:
    """Return the roles that requests need and that are not among ``roles``."""
    present = frozenset(roles)
    needed = frozenset({Role.PREFILL} if embeds_only else {Role.PREFILL, Role.DECODE})
    return frozenset() if Role.AGGREGATED in present else needed - present


def is_role_needed(
    role: Role, next_role: Role, others: Iterable[tuple[Role, bool]], *, embeds_only: bool
) -> bool:
    """Return True if a worker must keep ``role``: without it a role may be missing that is not missing with it.

    others: the roles of the other workers, each with True if this router has agreed to a change that is not over. Such a
    worker may take its next role or keep its present one, so neither counts.
    """
    staying = {one for one, changes in others if not changes}
    before = missing_roles({role, *staying}, embeds_only=embeds_only)
    return bool(missing_roles({next_role, *staying}, embeds_only=embeds_only) - before)
