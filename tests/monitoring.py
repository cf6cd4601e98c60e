"""The files of deploy/ that Prometheus and Grafana read, and what they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import generate_latest

from draft_service.metrics import PreparationMetrics
from gateway.metrics import GatewayMetrics
from tandem.service_metrics import ServiceMetrics

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy/grafana/dashboards/tandem.json"
DATASOURCE = ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml"
PROMETHEUS = ROOT / "deploy/prometheus/prometheus.yml"
RULES = ROOT / "deploy/prometheus/rules/tandem.yml"
RULES_TEST = ROOT / "tests/prometheus/rules_test.yml"


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels that show something; rows are headings."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def metrics_in(expression: str) -> set[str]:
    """The names of metrics in a PromQL expression: ours, and those of every process."""
    without_labels = re.sub(r"\{[^}]*\}", "", expression)
    return set(re.findall(r"\b(?:tandem_|tandem:|process_)[\w:]+", without_labels))


def exported() -> set[str]:
    """The names of all samples that the three services export."""
    gateway = GatewayMetrics(max_num_draft_tokens=2)
    gateway.watch(running=int, waiting=int, promised_tokens=int, target_up=bool, draft_up=bool)
    gateway.declare_routes(["/v1/models"])
    service = ServiceMetrics()
    service.describe(None, threads=1)
    service.watch_engine(blocks_held=int, blocks=1, programs=int, cached_sessions=int)
    PreparationMetrics(service.registry)
    pages = gateway.exposition("")[0] + _page(service)
    return set(re.findall(r"^(\w+)[ {]", pages.decode(), re.MULTILINE))


def _page(service: ServiceMetrics) -> bytes:
    return generate_latest(service.registry)
