"""The bodies of /v1/files and /v1/batches, and the objects that they return."""

from router.batches.input_lines import ENDPOINTS
from router.batches.records import BatchStatus, Purpose
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
_COUNT: Json = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL: Json = {"type": ["integer", "null"], "minimum": 0}
_STRING: Json = {"type": "string"}
_STRING_OR_NULL: Json = {"type": ["string", "null"]}

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


def _shown(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list_of(schema: str) -> Json:
    return _shown(
        object={"const": "list"},
        data={"type": "array", "items": {"$ref": f"#/components/schemas/{schema}"}},
        first_id=_STRING_OR_NULL,
        last_id=_STRING_OR_NULL,
        has_more={"type": "boolean"},
    )


OBJECTS: Json = {
    "File": _shown(
        id=_ID,
        object={"const": "file"},
        bytes=_COUNT,
        created_at=_COUNT,
        expires_at=_COUNT,
        filename=_STRING,
        purpose={"enum": [purpose.value for purpose in Purpose]},
        status={"const": "processed"},
        status_details={"type": "null"},
    ),
    "FileList": _list_of("File"),
    "DeletedFile": _shown(id=_ID, object={"const": "file"}, deleted={"const": True}),
    "Batch": _shown(
        id=_ID,
        object={"const": "batch"},
        endpoint={"enum": list(ENDPOINTS)},
        errors={"type": ["object", "null"]},
        input_file_id=_ID,
        completion_window={"const": WINDOW},
        status={"enum": [status.value for status in BatchStatus]},
        output_file_id=_STRING_OR_NULL,
        error_file_id=_STRING_OR_NULL,
        created_at=_COUNT,
        in_progress_at=_COUNT_OR_NULL,
        expires_at=_COUNT,
        finalizing_at=_COUNT_OR_NULL,
        completed_at=_COUNT_OR_NULL,
        failed_at=_COUNT_OR_NULL,
        expired_at=_COUNT_OR_NULL,
        cancelling_at=_COUNT_OR_NULL,
        cancelled_at=_COUNT_OR_NULL,
        request_counts=_shown(total=_COUNT, completed=_COUNT, failed=_COUNT),
        metadata={"type": ["object", "null"], "additionalProperties": _STRING},
    ),
    "BatchList": _list_of("Batch"),
}
