"""Metrics: named by Prometheus' conventions, documented from the code; dashboard and alerts ask for what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from meshnet_cli.metric_reference import MetricFacts, facts, page
from meshnet_core.doorkeeper import REASONS
from meshnet_gateway.status import GatewayFigures
from meshnet_gateway.waiting_room import WaitingRoom
from promql import PromQlError, read

ROOT = Path(__file__).parents[2]
ALL = [fact for found in facts().values() for fact in found]
# Labels with few values, all of them the code's own; a client, a model or a session has none.
BOUNDED = {
    "action",
    "call",
    "code",
    "endpoint",
    "error",
    "form",
    "kind",
    "outcome",
    "part",
    "reason",
    "result",
    "told_by",
    "version",
}
SCRAPED = {"instance", "job"}  # what Prometheus adds
NOT_OURS = {"up": set[str](), "process_resident_memory_bytes": set[str](), "process_cpu_seconds_total": set[str]()}


def queries() -> list[tuple[str, str]]:
    dashboard = json.loads((ROOT / "deploy/grafana/meshnet.json").read_text("utf-8"))
    found = [
        (panel["title"], target["expr"].replace("$__rate_interval", "5m"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    return found + [(rule["alert"], rule["expr"]) for rule in alerts()]


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text("utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def series() -> dict[str, set[str]]:
    """Every name that a query may ask for, with its labels."""
    known = {name: set(labels) for name, labels in NOT_OURS.items()}
    for fact in ALL:
        for name in fact.series:
            known.setdefault(name, set()).update(fact.labels, {"le"} if name.endswith("_bucket") else ())
    return known


def test_the_page_is_what_the_code_registers() -> None:
    assert (ROOT / "docs/metrics.md").read_text("utf-8") == page(), (
        "docs/metrics.md is behind the code: python -m meshnet_cli.metric_reference > docs/metrics.md"
    )


@pytest.mark.parametrize("part", ["tracker", "node", "gateway"])
def test_names_say_their_part_and_their_base_unit(part: str) -> None:
    for fact in facts()[part]:
        assert fact.name == "meshnet_build_info" or fact.name.startswith(f"meshnet_{part}_")
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", fact.name)
        assert not re.search(r"_(ms|millis\w*|minutes|[kmg]i?b|megabytes|percent|total)(_|$)", fact.name), fact.name
        assert fact.text, fact.name
        if fact.kind == "histogram":
            assert fact.name.endswith(("_seconds", "_frames"))
        if re.search(r"\bbytes\b", fact.text.lower()) and fact.kind != "counter":
            assert fact.name.endswith("_bytes"), fact
        assert fact.kind in {"counter", "gauge", "histogram"}


def test_no_label_has_values_without_bound() -> None:
    assert {label for fact in ALL for label in fact.labels} <= BOUNDED
    assert len(REASONS) < 30


def test_no_two_metrics_of_a_part_have_one_name() -> None:
    for part, found in facts().items():
        names = [name for fact in found for name in fact.series]
        assert len(names) == len(set(names)), part


def test_what_a_gateway_tells_is_what_prometheus_reads() -> None:
    figures = GatewayFigures(CollectorRegistry(), lambda: 2, WaitingRoom(_clock()))
    figures.ended("chat", "ok")
    read_back = {family.name for family in text_string_to_metric_families(figures.exposition().decode())}
    told = {fact.name for fact in facts()["gateway"]} - {"meshnet_gateway_turned_away"}
    assert told <= read_back


@pytest.mark.parametrize(
    ("title", "query"), queries(), ids=[f"{title}-{at}" for at, (title, _) in enumerate(queries())]
)
def test_a_query_asks_for_metrics_and_labels_that_there_are(title: str, query: str) -> None:
    known = series()
    asked = read(query)
    assert asked.metrics, title
    labels = set(SCRAPED)
    for metric, matched in asked.metrics:
        assert metric in known, f"{title}: no part has a metric {metric}"
        assert matched <= known[metric] | SCRAPED, f"{title}: {metric} has no labels {matched - known[metric]}"
        labels |= known[metric]
    assert asked.grouped <= labels, f"{title}: no labels {asked.grouped - labels} here"


def test_counters_are_asked_for_their_rate_and_gauges_are_not() -> None:
    counters = {name for fact in ALL if fact.kind != "gauge" for name in fact.series}
    for title, query in queries():
        rated = set(re.findall(r"(?:rate|increase)\(\s*(\w+)", query))
        ours = {metric for metric, _ in read(query).metrics if metric.startswith("meshnet_")}
        assert ours & counters <= rated, title
        assert not (ours - counters) & rated, title


def test_legends_and_summaries_name_labels_that_the_query_keeps() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/meshnet.json").read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            _kept(panel["title"], target["expr"], re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
    for rule in alerts():
        texts = " ".join(rule["annotations"].values())
        _kept(rule["alert"], rule["expr"], re.findall(r"\$labels\.(\w+)", texts))


def _kept(title: str, query: str, named: list[str]) -> None:
    asked = read(query.replace("$__rate_interval", "5m"))
    if asked.aggregated:
        assert set(named) <= asked.grouped, f"{title}: {named} of {asked.grouped}"
    else:
        known = series()
        everything = SCRAPED.union(*(known[metric] for metric, _ in asked.metrics))
        assert set(named) <= everything, title


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) >= 10
    for rule in alerts():
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert re.fullmatch(r"\d+[smhd]", rule["for"])
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 20


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/meshnet.json").read_text("utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.parametrize(
    "broken", ["rate(meshnet_node_sessions[5m]", "sum by (le (x))", 'x{a="b}', "x{a}", "x}", "sum by le (x)", "x[5"]
)
def test_a_query_that_is_none_is_noticed(broken: str) -> None:
    with pytest.raises(PromQlError):
        read(broken)


def test_a_misspelt_metric_or_label_is_noticed() -> None:
    asked = read('sum by (wrong) (rate(meshnet_node_callz_total{result!="ok", odd=~"a{2}"}[5m]))')
    assert asked.metrics == [("meshnet_node_callz_total", {"result", "odd"})]
    assert asked.grouped == {"wrong"}
    assert "meshnet_node_callz_total" not in series()
    assert MetricFacts("a", "counter", (), "").series == ("a_total",)


def _clock() -> Any:
    from meshnet_core.clock import ManualClock  # noqa: PLC0415 - one test's

    return ManualClock()
