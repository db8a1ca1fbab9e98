"""Conversion of plain counters to Prometheus families."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import EngineCollector, parse_counter_name, render


def test_counter_names_carry_labels() -> None:
    assert parse_counter_name("steps_total") == ("steps_total", {})
    assert parse_counter_name("transfer_blocks_total{transport=tcp, peer=p0}") == (
        "transfer_blocks_total",
        {"transport": "tcp", "peer": "p0"},
    )
    with pytest.raises(ValueError, match="label 'tcp' has no value"):
        parse_counter_name("transfer_blocks_total{tcp}")


def test_samples_of_one_name_are_one_family_with_its_type_and_help() -> None:
    counters = {"num_blocks{state=free}": 5.0, "num_blocks{state=held}": 2.0, "made_up_total": 1.0}
    families = {f.name: f for f in text_string_to_metric_families(render(EngineCollector(counters)).decode())}
    blocks = families["kvbaton_num_blocks"]
    assert (blocks.type, blocks.documentation) == ("gauge", "KV blocks of the pool, by state.")
    assert [(sample.labels["state"], sample.value) for sample in blocks.samples] == [
        ("free", 5.0),
        ("held", 2.0),
    ]
    assert families["kvbaton_made_up"].type == "counter"


def test_common_labels_are_added() -> None:
    text = render(EngineCollector({"steps_total": 1.0}, {"worker": "p0"})).decode()
    assert 'kvbaton_steps_total{worker="p0"} 1.0' in text
