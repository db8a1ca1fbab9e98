"""Messages between processes: ``*.proto`` files and the code generated from them.

WORKER_PROTOCOL_MIN, WORKER_PROTOCOL_MAX: versions of ``worker.proto`` that this code supports, as router and as worker.
"""

WORKER_PROTOCOL_MIN = 3
WORKER_PROTOCOL_MAX = 3
