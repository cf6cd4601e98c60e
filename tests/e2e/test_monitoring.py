"""A real Prometheus, with the configuration and rules that are shipped, scrapes the three services; every panel of the
dashboard gets its answer from it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from tests.monitoring import PROMETHEUS, RULES, metrics_in, panels, rules
from tests.ports import free_port
from tests.promtool import check_metrics
from tests.stack import Stack

pytestmark = pytest.mark.bundled

RATE = "sum(tandem_spec_decode_num_accepted_tokens_total) / sum(tandem_spec_decode_num_draft_tokens_total)"
LENGTH = "1 + sum(tandem_spec_decode_num_accepted_tokens_total) / sum(tandem_spec_decode_num_drafts_total)"


@pytest.fixture(scope="module")
def prometheus(bundled: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes `bundled` every half second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load(PROMETHEUS.read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "400ms", "evaluation_interval": "1s"}
    ports = {
        "target": bundled.target_metrics_port,
        "draft": bundled.draft_metrics_port,
        "gateway": bundled.gateway_metrics_port,
    }
    for job in config["scrape_configs"]:
        (static,) = job["static_configs"]
        static["targets"] = [f"127.0.0.1:{ports[job['job_name']]}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copytree(RULES.parent, folder / "rules")
    port = free_port()
    process = subprocess.Popen(
        [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _until_scraped(url)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _until_scraped(url: str) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            if _query(url, "up") == [1.0, 1.0, 1.0]:
                return
        except (httpx.HTTPError, ValueError):
            pass  # still starting: nobody listens yet, or what answers is no JSON
        assert time.monotonic() < end, "Prometheus did not scrape all three within 30 s"
        time.sleep(0.3)


def _answer(url: str, path: str, **parameters: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/api/v1/{path}", params=parameters, timeout=5).json()
    assert answer["status"] == "success", answer
    data: dict[str, Any] = answer["data"]
    return data


def _query(url: str, expression: str) -> list[float]:
    return [float(row["value"][1]) for row in _answer(url, "query", query=expression)["result"]]


def _speak(stack: Stack) -> None:
    """A bit of everything: drafts accepted, plain decoding, samples, a refusal."""
    report = stack.complete(prompt="one two three one two three one two", max_tokens=48, temperature=0)["speculation"]
    assert report["accepted"] > 0
    stack.complete(prompt="Once upon a time", max_tokens=24, seed=1, speculation={"enabled": False})
    stack.client.post(f"{stack.url}/v1/completions", json={"prompt": ""})


def test_prometheus_scrapes_all_three_and_answers_the_acceptance_rate(bundled: Stack, prometheus: str) -> None:
    _speak(bundled)
    time.sleep(1.5)  # one more scrape, after the answers above were counted
    drafted = bundled.metric("gateway", "tandem_spec_decode_num_draft_tokens_total")
    accepted = bundled.metric("gateway", "tandem_spec_decode_num_accepted_tokens_total")
    drafts = bundled.metric("gateway", "tandem_spec_decode_num_drafts_total")
    assert _query(prometheus, RATE) == [pytest.approx(accepted / drafted)]
    assert _query(prometheus, LENGTH) == [pytest.approx(1 + accepted / drafts)]


def test_prometheus_loads_every_rule_and_none_fails(bundled: Stack, prometheus: str) -> None:
    _speak(bundled)
    time.sleep(2.5)
    loaded = [rule for group in _answer(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in loaded} == {rule.get("alert") or rule["record"] for rule in rules()}
    assert {(rule["name"], rule["health"], rule.get("lastError")) for rule in loaded} == {
        (rule["name"], "ok", None) for rule in loaded
    }
    assert [rule["name"] for rule in loaded if rule.get("state") == "firing"] == []


def test_every_panel_of_the_dashboard_has_its_metrics_and_an_answer(bundled: Stack, prometheus: str) -> None:
    for _ in range(3):
        _speak(bundled)
        time.sleep(1.0)
    there = set(_answer(prometheus, "label/__name__/values"))
    for panel in panels():
        for target in panel["targets"]:
            assert metrics_in(target["expr"]) <= there, panel["title"]
            rows = _answer(prometheus, "query", query=target["expr"].replace("$__rate_interval", "20s"))["result"]
            assert rows or panel["title"] == "Alerts", (panel["title"], target["expr"])


def test_promtool_finds_nothing_wrong_with_any_service_s_metrics(bundled: Stack) -> None:
    for port in (bundled.target_metrics_port, bundled.draft_metrics_port, bundled.gateway_port):
        check_metrics(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
    for port in (bundled.gateway_port, bundled.gateway_metrics_port):
        page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert "tandem_spec_decode_num_drafts_total" in page
