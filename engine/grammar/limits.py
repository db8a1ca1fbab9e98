"""The limits of one grammar; every limit of the library is set here.

Measured on one core of Zen 3 with a vocabulary of 60,000 tokens over some 60 hostile grammars (docs/security.md): none
takes more than 30 MB, 2 s to compile, or 0.2 s for a step.
"""

from llguidance import LLParserLimits

GRAMMAR_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=40_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=True,
    verbose_errors=False,
)
"""initial_lexer_fuel, step_lexer_fuel: some 200 bytes a unit, and max_lexer_states: 1 kB a state; kept by each matcher."""

MAX_CACHED = 64
MAX_CACHED_BYTES = 2**25
MAX_ENTRY_BYTES = 2**24
"""Bounds of the compiled grammars that are cached: all together, and one."""
HEAVY_BYTES = 2**23
MAX_HEAVY_BYTES = 3 * 2**24
"""Grammars that were measured to build HEAVY_BYTES or more: together, those that answers follow at the same time."""
MAX_LIVE_BYTES = 2**32
"""The bound of compiled grammars in use and cached; above it no other grammar is compiled."""
MOST_GROWTH_AT_ONCE = 2**20
MOST_GROWTH_PER_SECOND = 10**9
"""The bytes that a thread can have built: a fixed part, and one for its processor time, twice the most measured."""
