"""Dashboard and alerts: the file is the table's, every metric exists, and Prometheus itself finds data for all."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agentkv_serve.engine.metrics import WorkerMetrics
from agentkv_serve.gateway.metrics import Metrics
from tests.operate.compose import DOCKER
from tests.operate.tools import debian, importable

MADE = runpy.run_path(str(DOCKER / "grafana" / "make_dashboard.py"))
FILE = DOCKER / "grafana" / "dashboards" / "agentkv.json"
PANELS: list[dict[str, Any]] = [p for p in json.loads(FILE.read_text())["panels"] if p["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
RULES = [
    rule
    for group in yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
STOCK = {"token_usage", "num_running_reqs", "num_queue_reqs"}
"""SGLang's own series; the long tests look them up in a real scrape."""


def samples(text: str) -> dict[str, set[str]]:
    """Names of samples with the labels that they carry."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, set[str]]]:
    """What each job exposes. A labelled metric shows its labels only once it was touched."""
    gateway, engine = Metrics(), WorkerMetrics(reports=True)
    for registry in (gateway.registry, engine.registry):
        for metric in list(registry._collector_to_names):
            names = getattr(metric, "_labelnames", ())
            if names:
                metric.labels(*["x"] * len(names))
    return {
        "gateway": samples(gateway.render().decode()),
        "engine": samples(generate_latest(engine.registry).decode()),
    }


def test_the_dashboard_is_what_the_table_says() -> None:
    assert FILE.read_text() == MADE["text"](), "run docker/grafana/make_dashboard.py"


def test_panels_do_not_overlap_and_explain_themselves() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(FILE.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_series_exists_with_the_labels_that_are_asked_for(
    query: str, known: dict[str, dict[str, set[str]]]
) -> None:
    selectors = re.findall(r"(agentkv_\w+|\bup)\{([^}]*)\}", query)
    stock = re.findall(r"\{__name__=~\"sglang\[:_\](\w+)\", job=\"engine\"\}", query)
    assert (selectors or stock) and set(stock) <= STOCK, query
    for name, matchers in selectors:
        pairs = dict(re.findall(r"(\w+)(?:=~|!~|!=|=)\"([^\"]*)\"", matchers))
        job = pairs.pop("job")
        if name == "up":
            continue
        assert name in known[job], f"{name} is no metric of the {job}"
        assert set(pairs) <= known[job][name], (name, pairs)
    by = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
    exposed = {label for job in known.values() for name, _ in selectors for label in job.get(name, ())}
    assert by <= exposed | {"le", "instance", "job"}


def test_a_name_means_one_thing(known: dict[str, dict[str, set[str]]]) -> None:
    """Queries that forget the job must not add up the gateway's numbers and the engine's."""
    assert known["gateway"].keys().isdisjoint(known["engine"])


def test_every_alert_says_how_bad_and_what_it_is() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]


@pytest.mark.long
def test_the_queries_parse() -> None:
    importable("promql-parser==0.12.0")
    import promql_parser

    for query in QUERIES:
        promql_parser.parse(query.replace("$__rate_interval", "1m"))


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]],
)
def test_promtool_passes(command: list[str]) -> None:
    promtool = debian("promtool", "prometheus")
    done = subprocess.run([promtool, *command], cwd=DOCKER / "prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
