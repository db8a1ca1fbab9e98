"""The bodies of /v1/files and /v1/batches."""

from router.batches.lines import ENDPOINTS
from router.batches.records import Purpose
from router.http.bodies.body import Json
from router.http.schema.notation import field

MIN_KEPT_SECONDS = 3600
MAX_KEPT_SECONDS = 30 * 24 * 3600
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
WINDOW = "24h"

_ID: Json = {"type": "string", "minLength": 1}
_SECONDS: Json = {"type": "integer", "minimum": MIN_KEPT_SECONDS, "maximum": MAX_KEPT_SECONDS}

BATCH: Json = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {**_ID, "description": "A file with the purpose batch: one request per line."},
        "endpoint": {"enum": list(ENDPOINTS), "description": "The url of every line of the file."},
        "completion_window": {"const": WINDOW, "description": "The time limit of the batch."},
        "metadata": field(
            "object",
            "Returned unchanged with the batch.",
            maxProperties=MAX_METADATA_PAIRS,
            propertyNames={"maxLength": MAX_METADATA_KEY},
            additionalProperties={"type": "string", "maxLength": MAX_METADATA_VALUE},
        ),
        "output_expires_after": field(
            "object",
            "When the result files are removed. Default: as all files.",
            required=["anchor", "seconds"],
            properties={"anchor": {"const": "created_at"}, "seconds": _SECONDS},
        ),
    },
}
UPLOAD: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"const": Purpose.BATCH.value},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": _SECONDS,
    },
}
