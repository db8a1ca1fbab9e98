"""What processes say to each other: ``*.proto`` and the code that is generated from them.

PROTOCOL_MIN, PROTOCOL_MAX: the versions of ``worker.proto`` that this code speaks, as router and as worker.
"""

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
