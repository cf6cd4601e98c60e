"""A real Prometheus scrapes the three services and answers the questions that the metrics are for."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.promtool import check_metrics
from tests.stack import Stack, free_port

pytestmark = pytest.mark.bundled

RATE = "sum(tandem_spec_decode_num_accepted_tokens_total) / sum(tandem_spec_decode_num_draft_tokens_total)"
LENGTH = "1 + sum(tandem_spec_decode_num_accepted_tokens_total) / sum(tandem_spec_decode_num_drafts_total)"


@pytest.fixture
def prometheus(bundled: Stack, tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes `bundled` every half second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    ports = (bundled.target_metrics_port, bundled.draft_metrics_port, bundled.gateway_port)
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 400ms}\n"
        f"scrape_configs: [{{job_name: tandem, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    port = free_port()
    process = subprocess.Popen(
        [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(10)


def _query(url: str, expression: str) -> list[float]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=5).json()
    assert answer["status"] == "success", answer
    return [float(row["value"][1]) for row in answer["data"]["result"]]


def test_prometheus_scrapes_all_three_and_answers_the_acceptance_rate(bundled: Stack, prometheus: str) -> None:
    report = bundled.complete(prompt="one two three one two three one two", max_tokens=48, temperature=0)["speculation"]
    assert report["accepted"] > 0
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if _query(prometheus, "up") == [1.0, 1.0, 1.0] and _query(prometheus, RATE):
                break
        except httpx.HTTPError:
            pass  # still starting
        time.sleep(0.3)
    time.sleep(1.5)  # one more scrape, after the answer above was counted
    drafted = bundled.metric("gateway", "tandem_spec_decode_num_draft_tokens_total")
    accepted = bundled.metric("gateway", "tandem_spec_decode_num_accepted_tokens_total")
    drafts = bundled.metric("gateway", "tandem_spec_decode_num_drafts_total")
    assert _query(prometheus, "up") == [1.0, 1.0, 1.0]
    assert _query(prometheus, RATE) == [pytest.approx(accepted / drafted)]
    assert _query(prometheus, LENGTH) == [pytest.approx(1 + accepted / drafts)]


def test_promtool_finds_nothing_wrong_with_any_service_s_metrics(bundled: Stack) -> None:
    for port in (bundled.target_metrics_port, bundled.draft_metrics_port, bundled.gateway_port):
        check_metrics(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
