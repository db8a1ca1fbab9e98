"""The record of a move lists its parts."""

from contract.outputs import RequestTimings, TransferReport
from router.telemetry.migration_record import MigrationRecord

TIMINGS = RequestTimings(
    queue_seconds=0.03, transfer=TransferReport(exposed_seconds=0.02, num_bytes=9, waiting_seconds=0.5)
)


def a_record() -> MigrationRecord:
    record = MigrationRecord("one", 2, "decode-0", ordered_at=5.0, handed_off_at=5.25)
    record.target_chosen("decode-1", 7)
    record.on_continued(6.0, 10, TIMINGS)
    return record


def test_a_record_has_the_parts_that_the_target_has_measured() -> None:
    found = a_record().as_dict()
    assert (found["waiting_seconds"], found["fetching_seconds"], found["queue_seconds"]) == (0.5, 0.02, 0.03)
    assert (found["pause_seconds"], found["num_steps"], found["num_bytes"]) == (0.75, 3, 9)


def test_the_line_for_the_log_names_every_part() -> None:
    assert str(a_record()) == (
        "request one (choice 2) was moved from decode-0 to decode-1: handing off 0.250 s; pause 0.750 s, "
        "of it waiting for the source 0.500, fetching 9 bytes 0.020, queue 0.030; 3 steps"
    )
