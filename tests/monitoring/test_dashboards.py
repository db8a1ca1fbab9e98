"""The dashboards: generated files in the form that Grafana provisions, with queries of declared metrics only."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from serving.metric_names import PREFIX, ROUTER_METRICS, WORKER_METRICS
from tests.monitoring.prometheus import ROOT
from tests.monitoring.test_rules import rules
from tools.dashboards import DASHBOARDS
from tools.generate_dashboards import files, main

GRAFANA = ROOT / "docker" / "grafana"
PAGES = sorted((GRAFANA / "dashboards").glob("*.json"))
UNITS = Literal["short", "s", "ops", "bytes", "Bps", "percentunit"]


class Strict(BaseModel):
    """A part of Grafana's documents, which has these fields only."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Source(Strict):
    type: Literal["prometheus"]
    uid: str


class Target(Strict):
    ref_id: str = Field(pattern="^[A-Z]$")
    datasource: Source
    expr: str = Field(min_length=1)
    legend_format: str = Field(min_length=1)


class Defaults(Strict):
    unit: UNITS
    min: int


class FieldConfig(Strict):
    defaults: Defaults
    overrides: list[object]


class Place(Strict):
    h: int = Field(ge=1)
    w: int = Field(ge=1, le=24)
    x: int = Field(ge=0, le=23)
    y: int = Field(ge=0)


class Panel(Strict):
    id: int = Field(ge=1)
    title: str = Field(min_length=1)
    type: Literal["timeseries"]
    datasource: Source
    grid_pos: Place
    field_config: FieldConfig
    targets: list[Target] = Field(min_length=1)


class Query(Strict):
    query: str
    ref_id: str


class Variable(Strict):
    name: str
    type: Literal["query"]
    datasource: Source
    query: Query
    refresh: Literal[1, 2]
    sort: int


class Templating(Strict):
    list: list[Variable]


class Page(Strict):
    uid: str = Field(max_length=40, pattern="^[a-zA-Z0-9_-]+$")
    title: str
    tags: list[str]
    schema_version: int = Field(ge=36)
    editable: bool
    refresh: str
    time: dict[str, str]
    templating: Templating
    panels: list[Panel]


class DataSource(Strict):
    name: str
    uid: str
    type: Literal["prometheus"]
    access: Literal["proxy"]
    url: str
    is_default: bool
    json_data: dict[str, str]


class DataSources(Strict):
    api_version: Literal[1]
    datasources: list[DataSource]


class Provider(Strict):
    name: str
    folder: str
    type: Literal["file"]
    allow_ui_updates: bool
    options: dict[str, str]


class Providers(Strict):
    api_version: Literal[1]
    providers: list[Provider]


def test_the_committed_files_are_in_sync(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert main(["--check"], tmp_path) == 1
    assert "run `make dashboards`" in capsys.readouterr().err
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    assert {page.name for page in PAGES} == dict(files()).keys()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_dashboard_has_the_form_that_grafana_reads(path: Path) -> None:
    page = Page.model_validate(json.loads(path.read_text()))
    assert page.uid == path.stem
    assert len({panel.id for panel in page.panels}) == len(page.panels)
    for panel in page.panels:
        assert len({target.ref_id for target in panel.targets}) == len(panel.targets)
        assert panel.grid_pos.x + panel.grid_pos.w <= 24
    for one, other in combinations((panel.grid_pos for panel in page.panels), 2):
        is_apart = one.x + one.w <= other.x or other.x + other.w <= one.x
        assert is_apart or one.y + one.h <= other.y or other.y + other.h <= one.y
    used = set(re.findall(r"\$(?!__)(\w+)", path.read_text()))
    assert used == {variable.name for variable in page.templating.list}


def test_grafana_finds_the_source_and_the_dashboards() -> None:
    sources = DataSources.model_validate(
        yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    )
    Providers.model_validate(
        yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "kvbaton.yml").read_text())
    )
    used = {uid for path in PAGES for uid in re.findall(r'"uid": "(prometheus)"', path.read_text())}
    assert used == {source.uid for source in sources.datasources}


def test_panels_read_declared_metrics_only() -> None:
    declared = {**ROUTER_METRICS, **WORKER_METRICS}
    records = {rule["record"] for rule in rules() if "record" in rule}
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for target in panel.targets:
                names = set(re.findall(r"kvbaton[_:][a-z0-9_:]+", target.expression))
                for name in names - records:
                    bare = name.removeprefix(PREFIX)
                    metric = declared.get(bare) or declared[re.sub(r"_(bucket|sum|count)$", "", bare)]
                    assert metric.is_histogram == (bare not in declared), name
                for label in re.findall(r"{{(\w+)}}", target.legend):
                    assert label in target.expression or any(
                        label in declared[name.removeprefix(PREFIX)].labels
                        for name in names
                        if name.removeprefix(PREFIX) in declared
                    ), (panel.title, label)


def test_no_two_dashboards_are_the_same() -> None:
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len(DASHBOARDS) == 4
