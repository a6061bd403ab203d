"""Writes dashboards/agentkv.json from the table of panels below: the table is what people edit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "dashboards" / "agentkv.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 8, 8
CHAT = 'route=~"chat_completions|messages|create_response"'


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: PromQL and legend of each line. `stacked`: the lines add up to something."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str
    stacked: bool = False


def quantiles(metric: str, selector: str) -> tuple[tuple[str, str], ...]:
    """The median and the 95th and 99th percentile of a histogram."""
    rate = f"sum by (le) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {rate})", f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99))


def rate(metric: str, selector: str, by: str) -> tuple[tuple[str, str], ...]:
    """Events per second by a label."""
    return ((f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))", f"{{{{{by}}}}}"),)


GATEWAY, ENGINE = 'job="gateway"', 'job="engine"'


def stock(name: str) -> str:
    """One of SGLang's own series. Prometheus before version 3 is given its name with `_` in place of `:`."""
    return f'{{__name__=~"sglang[:_]{name}", {ENGINE}}}'


ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        Panel(
            "Requests by status",
            "reqps",
            rate("agentkv_requests_total", f"{GATEWAY}, {CHAT}", "status"),
            "Generations by HTTP status.",
            stacked=True,
        ),
        Panel(
            "Tokens",
            "short",
            rate("agentkv_tokens_total", GATEWAY, "kind"),
            "Tokens a second: in prompts, computed by prefill, generated. Sessions save the gap between the first two.",
        ),
        Panel(
            "Requests in flight",
            "short",
            ((f"sum(agentkv_requests_in_flight{{{GATEWAY}}})", "in flight"),),
            "Requests that gateways are serving now.",
        ),
        Panel(
            "Time to first token",
            "s",
            quantiles("agentkv_time_to_first_token_seconds", GATEWAY),
            "From request to first content frame, streamed turns.",
        ),
        Panel(
            "Time between tokens",
            "s",
            quantiles("agentkv_inter_token_seconds", GATEWAY),
            "Mean per turn, streamed turns.",
        ),
        Panel(
            "Time of a request",
            "s",
            quantiles("agentkv_request_duration_seconds", f"{GATEWAY}, {CHAT}"),
            "From request to last byte.",
        ),
    ),
    "Sessions": (
        Panel(
            "Sessions by state",
            "short",
            ((f"sum by (state) (agentkv_sessions{{{ENGINE}}})", "{{state}}"),),
            "Sessions that hold KV: running a turn (live) or waiting for their next one (idle).",
            stacked=True,
        ),
        Panel(
            "Turns by state",
            "short",
            rate("agentkv_turns_total", GATEWAY, "state"),
            "Turns a second: new, resumed, rebuilt, moved.",
            stacked=True,
        ),
        Panel(
            "Prompt tokens that were not computed",
            "percentunit",
            (
                (
                    f'1 - sum(rate(agentkv_tokens_total{{{GATEWAY}, kind="prefilled"}}[$__rate_interval])) / '
                    f'sum(rate(agentkv_tokens_total{{{GATEWAY}, kind="prompt"}}[$__rate_interval]))',
                    "saved",
                ),
            ),
            "Share of all prompt tokens that sessions and shared prefixes already held.",
        ),
        Panel(
            "Rebuilds by reason",
            "short",
            rate("agentkv_rebuilds_total", ENGINE, "reason"),
            "Turns a second whose whole prompt was computed again. docs/operations.md explains the reasons.",
            stacked=True,
        ),
        Panel(
            "Idle sessions that gave way",
            "short",
            ((f"sum(rate(agentkv_sessions_reclaimed_total{{{ENGINE}}}[$__rate_interval]))", "reclaimed"),),
            "Sessions a second whose KV was released for running turns.",
        ),
        Panel(
            "Turns that left no trace",
            "short",
            (
                (
                    f"sum(rate(agentkv_turns_uncommitted_total{{{GATEWAY}}}[$__rate_interval])) or vector(0)",
                    "uncommitted",
                ),
                (f"sum(rate(agentkv_aborts_total{{{GATEWAY}}}[$__rate_interval])) or vector(0)", "aborted"),
            ),
            "Aborted or failed turns; their sessions are as they were before.",
        ),
    ),
    "KV cache": (
        Panel(
            "KV tokens held by phase",
            "short",
            ((f"sum by (phase) (agentkv_held_tokens{{{ENGINE}}})", "{{phase}}"),),
            "Per layer and KV head, over all sessions.",
            stacked=True,
        ),
        Panel(
            "KV tokens evicted by phase",
            "short",
            ((f"sum by (phase) (agentkv_evicted_tokens{{{ENGINE}}})", "{{phase}}"),),
            "Of the same sessions: tokens whose keys and values are gone.",
            stacked=True,
        ),
        Panel(
            "KV pool in use",
            "percentunit",
            ((stock("token_usage"), "{{instance}}"),),
            "Share of each engine's KV pool that is taken.",
        ),
        Panel(
            "Compactions",
            "short",
            ((f"sum(rate(agentkv_compactions_total{{{ENGINE}}}[$__rate_interval]))", "compactions"),),
            "Compressions of a session's KV a second.",
        ),
        Panel(
            "Time of a compaction",
            "s",
            quantiles("agentkv_compaction_seconds", ENGINE),
            "All layers, on the device.",
        ),
        Panel(
            "Budgets of turns",
            "short",
            quantiles("agentkv_budget_tokens", GATEWAY),
            "KV tokens per layer and head that turns asked for; full counts as infinite.",
        ),
        Panel(
            "Query rings",
            "bytes",
            ((f"agentkv_auxiliary_bytes{{{ENGINE}}}", "{{instance}}"),),
            "Memory beside the KV pool, allocated at start.",
        ),
        Panel(
            "KV tokens by worker",
            "short",
            ((f"max by (worker) (agentkv_session_kv_tokens{{{GATEWAY}}})", "{{worker}}"),),
            "What gateways place by.",
            stacked=True,
        ),
    ),
    "Health": (
        Panel(
            "Workers",
            "short",
            ((f"min by (worker) (agentkv_worker_up{{{GATEWAY}}})", "{{worker}}"),),
            "1 when every gateway sees the worker as healthy.",
        ),
        Panel(
            "Turns that run and wait",
            "short",
            (
                (f"sum({stock('num_running_reqs')})", "running"),
                (f"sum({stock('num_queue_reqs')})", "waiting"),
            ),
            "In all engines.",
        ),
        Panel(
            "Failures of workers",
            "short",
            (
                (
                    f"sum(rate(agentkv_upstream_errors_total{{{GATEWAY}}}[$__rate_interval])) or vector(0)",
                    "failures",
                ),
            ),
            "A second, as gateways see them.",
        ),
        Panel(
            "Redis",
            "short",
            (
                (f"max(agentkv_store_down{{{GATEWAY}}})", "down"),
                (f"sum(agentkv_store_sessions{{{GATEWAY}}}) / count(agentkv_store_sessions{{{GATEWAY}}})", "sessions"),
            ),
            "1 while sessions are not shared; and how many sessions the store holds.",
        ),
        Panel(
            "Time of a call to Redis",
            "s",
            quantiles("agentkv_store_seconds", GATEWAY),
            "Gateways with a shared store only.",
        ),
        Panel(
            "Targets",
            "short",
            (('min by (job) (up{job=~"gateway|engine"})', "{{job}}"),),
            "1 when Prometheus reaches all of a kind.",
        ),
    ),
}


def panel(number: int, spec: Panel, x: int, y: int) -> dict[str, Any]:
    """Grafana's form of one panel."""
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for i, (query, legend) in enumerate(spec.queries)
    ]
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if spec.stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 30}
    return {
        "id": number,
        "type": "timeseries",
        "title": spec.title,
        "description": spec.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": spec.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, specs in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []})
        panels[-1]["gridPos"] = {"x": 0, "y": y, "w": 24, "h": 1}
        y += 1
        for i, spec in enumerate(specs):
            panels.append(panel(len(panels) + 1, spec, WIDTH * (i % 3), y + HEIGHT * (i // 3)))
        y += HEIGHT * ((len(specs) + 2) // 3)
    return {
        "uid": "agentkv",
        "title": "AgentKV",
        "tags": ["agentkv"],
        "schemaVersion": 41,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "panels": panels,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
