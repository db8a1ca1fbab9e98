"""The rules and alerts for Prometheus: ``promtool`` checks and tests them, and each alert has a page for operators."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from serving.metric_names import PREFIX, ROUTER_METRICS, WORKER_METRICS
from tests.monitoring.prometheus import FOLDER, ROOT, program
from tools.dashboards import DASHBOARDS

TESTS = ROOT / "tests" / "monitoring" / "alerts.yml"
OF_THE_POOL = {
    "failed_pairs",
    "workers",
    "worker_restarts_total",
    "pool_utilization",
    "queue_seconds",
    "scaling_pressure",
    "desired_workers",
    "scaling_held_workers",
    "scaling_decisions_total",
    "scaling_decision_age_seconds",
    "autoscaler_restarts",
}
"""The metrics that every router publishes for the whole service."""
RUNBOOK = ROOT / "docs" / "runbook"


def rules() -> list[dict[str, Any]]:
    files = (yaml.safe_load((FOLDER / name).read_text()) for name in ("rules.yml", "alerts.yml"))
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


ALERTS = sorted({rule["alert"] for rule in rules() if "alert" in rule})


def promtool(*arguments: str) -> None:
    run = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.system
def test_the_configuration_and_the_rules_are_valid() -> None:
    promtool("check", "config", str(FOLDER / "prometheus.yml"))
    promtool("check", "rules", str(FOLDER / "rules.yml"), str(FOLDER / "alerts.yml"))


@pytest.mark.system
def test_the_rules_pass_their_own_tests() -> None:
    promtool("test", "rules", str(TESTS))


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_fires_in_one_test_and_is_silent_at_rest(alert: str) -> None:
    at_rest, *others = yaml.safe_load(TESTS.read_text())["tests"]
    assert at_rest["name"] == "a service at rest"
    silent = [test for test in at_rest["alert_rule_test"] if test["alertname"] == alert]
    assert len(silent) == 1 and "exp_alerts" not in silent[0]
    fired = [
        test
        for each in others
        for test in each.get("alert_rule_test", ())
        if test["alertname"] == alert and test.get("exp_alerts")
    ]
    assert fired


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_page_that_says_what_to_do(alert: str) -> None:
    for rule in rules():
        if rule.get("alert") == alert:
            page = ROOT / rule["annotations"]["runbook"]
            assert page.parent == RUNBOOK
            text = page.read_text()
            assert f"`{alert}`" in text
            assert re.findall(r"^## (.+)$", text, re.M) == ["Meaning", "Look at", "Do"]
            assert rule["labels"]["severity"] in ("critical", "warning")


def test_every_page_of_the_runbook_is_named_by_an_alert_and_listed() -> None:
    named = {rule["annotations"]["runbook"] for rule in rules() if "alert" in rule}
    pages = {page.relative_to(ROOT).as_posix() for page in RUNBOOK.glob("*.md")}
    assert pages == named
    listed = (ROOT / "docs" / "operate.md").read_text()
    assert all(f"({page.removeprefix('docs/')})" in listed for page in pages)


def without_max(expression: str) -> list[str]:
    """Return the metrics of the whole pool in an expression that no ``max`` (of the age: ``min``) combines over routers."""
    wrong = []
    for name in OF_THE_POOL:
        best = "min" if name.endswith("age_seconds") else "max"
        counted = rf"(?:increase\()?\(?{PREFIX}{name}\b"
        combined = rf"\b{best}(?: by \([a-z, ]+\))? \(?{counted}|\b{best}\({counted}"
        if len(re.findall(rf"{PREFIX}{name}\b", expression)) != len(re.findall(combined, expression)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("max by (pool) (kvbaton_scaling_pressure) > 1", []),
        ("sum by (pool) (kvbaton_scaling_pressure) > 1", ["scaling_pressure"]),
        ("kvbaton_desired_workers", ["desired_workers"]),
        ("max by (pool) (kvbaton_desired_workers) != sum by (pool) (kvbaton_workers)", ["workers"]),
        ("max(kvbaton_scaling_decision_age_seconds) > 60", ["scaling_decision_age_seconds"]),
    ],
)
def test_a_sum_over_routers_is_found(expression: str, wrong: list[str]) -> None:
    assert without_max(expression) == wrong


def test_rules_and_dashboards_take_the_highest_value_of_all_routers() -> None:
    """Every router publishes these for the whole pool: with two of them a sum would be twice the truth."""
    assert ROUTER_METRICS.keys() >= OF_THE_POOL
    for expression in [rule["expr"] for rule in rules() if "absent(" not in rule["expr"]]:
        assert without_max(expression) == [], expression
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for target in panel.targets:
                assert without_max(target.expression) == [], (panel.title, target.expression)


def test_rules_read_declared_metrics_only() -> None:
    records = {rule["record"] for rule in rules() if "record" in rule}
    known = {f"{PREFIX}{name}" for name in {**ROUTER_METRICS, **WORKER_METRICS}}
    for rule in rules():
        found = set(re.findall(r"kvbaton[_:][a-z0-9_:]+", rule["expr"]))
        assert found <= known | records, rule
        assert found or "up{" in rule["expr"], rule
