"""CPU time, memory and builds out of metrics pages; and what is known of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Info, ProcessCollector, generate_latest

from tandem.bench.machine import commit, cpu_model, describe_machine
from tandem.bench.processes import Processes, ProcessFigures, parse_metrics_urls, read_builds, read_figures, used
from tandem.errors import InvalidRequest, Unavailable


def page() -> str:
    """As prometheus_client writes it for this very process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("tandem_build", "Build", registry=registry).info({"version": "1.2", "engine": "torch"})
    return generate_latest(registry).decode()


def test_figures_are_read_from_a_real_page() -> None:
    figures = read_figures(page())
    assert figures.cpu_seconds is not None
    assert figures.resident_bytes is not None
    assert 0.0 < figures.cpu_seconds <= sum(os.times()[:2]) + 1.0
    assert figures.resident_bytes > 1e6
    assert read_builds(page()) == {"version": "1.2", "engine": "torch"}


def test_a_page_without_them_has_none() -> None:
    assert read_figures("# HELP x\nx_total 3\nprocess_cpu_seconds_total_other 4\n") == ProcessFigures(None, None)
    assert read_builds("") == {}


def test_what_was_used_is_the_difference_and_a_restart_does_not_count() -> None:
    before = {name: ProcessFigures(cpu, 1.0) for name, cpu in (("a", 1.0), ("b", 5.0), ("c", None), ("d", 1.0))}
    after = {name: ProcessFigures(cpu, 1.0) for name, cpu in (("a", 3.5), ("b", 0.5), ("c", 1.0), ("d", None))}
    assert used(before, after) == {"a": 2.5}


async def test_all_processes_are_asked_and_one_that_is_away_is_left_out() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "away":
            raise httpx.ConnectError("no")
        return httpx.Response(200, text=page())

    urls = {"here": "http://here/metrics", "gone": "http://away/metrics"}
    async with Processes(urls, transport=httpx.MockTransport(answer)) as processes:
        figures = await processes.figures()
        assert figures["here"].cpu_seconds is not None
        assert figures["gone"] == ProcessFigures(None, None)
        with pytest.raises(Unavailable, match="no metrics of gone at http://away/metrics"):
            await processes.builds(required=["gone"])
        assert (await processes.builds(required=["here"]))["gone"] == {}
    async with Processes({"here": "http://here"}, transport=httpx.MockTransport(answer)) as processes:
        assert await processes.builds(required=[]) == {"here": {"version": "1.2", "engine": "torch"}}


async def test_a_key_is_shown_to_the_page_that_it_is_for_and_to_no_other() -> None:
    shown: dict[str, str | None] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        shown[request.url.host] = request.headers.get("authorization")
        return httpx.Response(200, text=page())

    urls = {"gateway": "http://gateway/metrics", "target": "http://target/metrics"}
    async with Processes(urls, api_keys={"gateway": "k"}, transport=httpx.MockTransport(answer)) as processes:
        await processes.figures()
    assert shown == {"gateway": "Bearer k", "target": None}


def test_metrics_urls_are_named_once_and_lead_to_the_page() -> None:
    assert parse_metrics_urls(["target=http://x:1", "draft=http://y:2/metrics"]) == {
        "target": "http://x:1/metrics",
        "draft": "http://y:2/metrics",
    }
    for words in (["http://x:1"], ["a=x:1"], ["a=http://x", "a=http://y"], ["a b=http://x"]):
        with pytest.raises(InvalidRequest, match="write NAME=URL"):
            parse_metrics_urls(words)
    with pytest.raises(InvalidRequest, match="at most 32"):
        parse_metrics_urls([f"a{index}=http://x" for index in range(33)])


def test_the_machine_is_named() -> None:
    found = describe_machine({"OMP_NUM_THREADS": "2", "HOME": "secret"})
    assert found["cpu"]
    assert found["cpus_usable"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["threads"] == {"OMP_NUM_THREADS": "2"}
    assert "numpy" in found["packages"]


def test_a_processor_is_named_where_it_has_a_name() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 3: fast\n") == "Some CPU @ 3: fast"
    assert cpu_model("CPU implementer : 0x41\n") == ""


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
