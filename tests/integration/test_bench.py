"""`tandem bench` and `advise` against real services on tiny models: what they report, not how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack import Stack

pytestmark = pytest.mark.slow


def bench(*options: str, command: str = "bench") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.cli", command, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def workload(folder: Path, *, long: bool = False) -> Path:
    """Two categories of three prompts that repeat themselves, so that n-grams find something."""
    prompts = [
        {"prompt": f"{index} " + "abc abd " * 8, "category": category} for category in ("a", "b") for index in range(3)
    ]
    if long:
        prompts.append({"prompt": "x" * 5000, "category": "b"})
    file = folder / "workload.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return file


def test_a_run_reports_every_figure_in_both_arms(stack: Stack, tmp_path: Path) -> None:
    file, chart = tmp_path / "bench.json", tmp_path / "bench.svg"
    done = bench(
        "--url", stack.url, "--workload", str(workload(tmp_path)), "--concurrency", "1,3", "--max-tokens", "12",
        "--arm", 'k2={"num_draft_tokens": 2}', "--json", str(file), "--chart", str(chart),
        "--metrics-url", f"target=http://127.0.0.1:{stack.target_metrics_port}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Speed over plain decoding" in done.stdout
    assert chart.read_bytes().startswith(b"<?xml")
    document: dict[str, Any] = json.loads(file.read_text())
    lines = {(line["concurrency"], line["category"], line["arm"]): line for line in document["lines"]}
    assert set(lines) == {(c, name, arm) for c in (1, 3) for name in ("a", "b", "all") for arm in ("off", "k2")}
    for (_, _, arm), line in lines.items():
        assert line["num_requests"] in (3, 6)
        assert line["total_tokens_per_second"] > 0.0
        assert line["first_token_seconds"]["median"] > 0.0
        assert (line["acceptance"]["rate"] is None) == (arm == "off")
        assert "bench" in line["cpu_seconds_per_1000_tokens"]
    on = lines[1, "all", "k2"]
    assert on["ratios"]["decode_speed"]["count"] == 6
    assert on["ratios"]["decode_speed"]["low"] is not None
    assert len(on["acceptance"]["rate_by_position"]) <= 2
    assert on["bytes_per_round"] > 0.0
    assert document["served"]["status"] == "ready"
    assert len(document["requests"]) == 24


def test_a_request_that_fails_fails_the_run_and_the_others_are_still_shown(stack: Stack, tmp_path: Path) -> None:
    """A prompt longer than the context: its bytes are tokens here."""
    done = bench(
        "--url", stack.url, "--workload", str(workload(tmp_path, long=True)), "--max-tokens", "4", "--minutes", "1"
    )
    assert done.returncode == 1
    assert "2 requests failed; their pairs do not count" in done.stdout
    assert "FAILED workload.jsonl:7" in done.stdout
    assert "tokens/s" in done.stdout


def test_an_arm_that_is_refused_ends_the_run_with_its_name(stack: Stack, tmp_path: Path) -> None:
    done = bench("--url", stack.url, "--workload", str(workload(tmp_path)), "--arm", 'odd={"k": 2}')
    assert done.returncode == 1
    assert "arm odd: " in done.stderr
    assert "Traceback" not in done.stderr


def test_advice_rests_on_what_was_measured(stack: Stack, tmp_path: Path) -> None:
    """Two drafters with k up to 4, one request at a time and two; every figure is there, and no prompt."""
    file, page = tmp_path / "advice.json", tmp_path / "advice.html"
    done = bench(
        str(workload(tmp_path)), "--url", stack.url, "--drafter", "model", "--drafter", "ngram",
        "--num-draft-tokens", "4", "--per-category", "1", "--concurrency", "2", "--max-tokens", "16",
        "--json", str(file), "--html", str(page), command="advise",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(file.read_text())
    advice = document["advice"]
    assert done.stdout.startswith(advice["headline"])
    assert {each["concurrency"] for each in advice["by_concurrency"]} == {1, 2}
    profiles = {(each["drafter"], each["category"]): each for each in document["profiles"]}
    assert set(profiles) == {(name, category) for name in ("model", "ngram") for category in ("a", "b", "all")}
    for (name, _), profile in profiles.items():
        assert profile["num_answers"] in (1, 2)
        assert len(profile["accepted_by_position"]) == 4
        assert all(seconds > 0.0 for seconds in profile["seconds_by_drafted_tokens"]["verify"])
        assert profile["bytes_per_round"] > 0.0
        assert (profile["seconds_by_drafted_tokens"]["draft"][4] > 0.0) or name == "ngram"
    best = advice["by_concurrency"][0]
    checks = {(each["concurrency"], each["category"], each["num_draft_tokens"]) for each in document["checks"]}
    assert {(1, "all", best["num_draft_tokens"]), (1, "a", best["num_draft_tokens"]), (2, "all", "auto")} <= checks
    predicted = [(each["drafter"], each["category"]) for each in document["predictions"] if each["concurrency"] == 1]
    assert len(predicted) == 2 * 3 * 4
    assert all(each["speedup"]["estimate"] > 0.0 for each in document["predictions"])
    assert page.read_text().startswith("<!doctype html>")
    assert not any("abc abd" in text for text in (page.read_text(), file.read_text(), done.stdout, done.stderr))


def test_advice_without_anything_to_ask_is_refused_in_one_line(stack: Stack, tmp_path: Path) -> None:
    for options, words in (
        (("--drafter", "odd"), "there are auto, "),
        (("--html", str(tmp_path / "missing" / "x.html")), "does not exist"),
    ):
        done = bench(str(workload(tmp_path)), "--url", stack.url, *options, command="advise")
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_without_a_draft_the_figures_are_marked(stack: Stack, tmp_path: Path) -> None:
    stack.draft.kill()
    try:
        stack.wait_until("degraded")
        done = bench(
            "--url", stack.url, "--workload", str(workload(tmp_path)), "--per-category", "1", "--max-tokens", "4"
        )
    finally:
        stack.draft.start()
        stack.wait_until("ready")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT ONE TOKEN WAS DRAFTED in on" in done.stdout


def test_up_starts_services_for_the_run_and_leaves_none_behind(target_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = bench(
        "--up", "--model", str(target_folder), "--workload", str(workload(tmp_path)), "--per-category", "1",
        "--max-tokens", "8", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    served = json.loads(file.read_text())["served"]
    assert served["status"] == "ready"
    assert served["started_with"]["draft"] == "n-grams"
    assert set(served["builds"]) == {"gateway", "target"}  # which looks n-grams up itself
    with pytest.raises(httpx.ConnectError):
        httpx.get(served["url"], timeout=5.0)


def test_services_that_do_not_come_up_are_told(tmp_path: Path) -> None:
    done = bench("--up", "--model", str(tmp_path), "--workload", str(workload(tmp_path)))
    assert done.returncode == 1
    assert "error: target stopped (exit status 1); its last lines:" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_words_are_answered_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"prompt": 5}\n')
    for options, words in (
        (("--url", "http://127.0.0.1:9"), "no gateway answers"),
        (("--workload", str(tmp_path / "w.jsonl")), 'w.jsonl, line 1: "prompt" must be a text'),
        (("--concurrency", "0"), "write up to 16 different numbers"),
        (("--json", str(tmp_path / "missing" / "x.json")), "does not exist"),
        (("--chart", "x.pdf"), "must end in .svg or .png"),
    ):
        done = bench(*options)
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
