"""Checks and generators that ``make`` runs; not part of the package."""
