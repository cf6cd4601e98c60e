"""From records to figures, tables, JSON and picture. The records are made by hand, and so are the figures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tandem.bench.arms import BASELINE, ON
from tandem.bench.chart import check_chart, draw
from tandem.bench.plan import Sampling
from tandem.bench.report import Report, Served
from tandem.bench.session import Failure, GroupRun, Observation, Records
from tandem.bench.summary import ALL, summarise
from tandem.bench.tables import print_report
from tandem.bench.timeline import Speculation, Timeline
from tandem.bench.workload import Prompt, Workload
from tandem.errors import InvalidRequest

CATEGORIES = ("chat", "code")
NOTHING = Speculation(
    rounds=5, draftless_rounds=5, drafted=0, accepted=0, accepted_per_position=(0, 0),
    draft_seconds=0.0, verify_seconds=0.4, network_seconds=0.05, bytes_sent=0,
)  # fmt: skip
SOME = Speculation(
    rounds=3, draftless_rounds=1, drafted=4, accepted=2, accepted_per_position=(2, 0),
    draft_seconds=0.1, verify_seconds=0.2, network_seconds=0.05, bytes_sent=100,
)  # fmt: skip


def timeline(*, first: float, last: float, speculation: Speculation) -> Timeline:
    return Timeline(
        num_prompt_tokens=10,
        num_tokens=5,
        first_seconds=first,
        last_seconds=last,
        gap_seconds=(0.1, 0.2),
        text="secret answer",
        finish_reason="length",
        speculation=speculation,
    )


def recorded(*, prompts: int = 4) -> Records:
    """One request at a time. off: first token at 0.2 s, the other four within 0.8 s; on: at 0.25 s, within 0.4 s."""
    records = Records(num_groups=2 * prompts, num_groups_done=2 * prompts)
    for index in range(2 * prompts):
        category = CATEGORIES[index % 2]
        for arm, first, last, speculation in ((BASELINE, 0.2, 1.0, NOTHING), (ON, 0.25, 0.65, SOME)):
            records.observations.append(
                Observation(
                    arm=arm.name, group=index, concurrency=1, category=category, prompt=f"w:{index}", turn=0, repeat=0,
                    timeline=timeline(first=first, last=last, speculation=speculation),
                )
            )  # fmt: skip
            records.runs.append(
                GroupRun(
                    arm=arm.name, group=index, concurrency=1, category=category, seconds=last, num_tokens=5,
                    complete=True, cpu_seconds={"target": last / 2}, resident_bytes={"target": 2.0**20 * (index + 1)},
                )
            )  # fmt: skip
    return records


def reported(records: Records, *, levels: tuple[int, ...] = (1,)) -> Report:
    prompts = [Prompt(name=f"w:{i}", category=CATEGORIES[i % 2], turns=("secret question",)) for i in range(8)]
    return Report(
        began="2026-01-01T00:00:00+00:00",
        seconds=12.0,
        machine={
            "tandem": "0", "commit": "c0ffee", "cpu": "Some CPU", "cpus": 2, "cpus_usable": 2, "memory_bytes": 2**32,
            "os": "Some OS", "python": "3", "packages": {"numpy": "2"}, "threads": {}, "load_average": 0.1,
        },
        served=Served(
            url="http://gateway", model={"id": "big-model"}, status="ready", reasons=(),
            builds={"target": {"engine": "torch"}, "gateway": {}}, started_with={"model": "bundled"},
        ),
        arms=(BASELINE, ON),
        workload=Workload(name="w", prompts=tuple(prompts)),
        sampling=Sampling(max_tokens=5, temperature=0.0, seed=None),
        levels=levels,
        repeats=1,
        shared_prefix=False,
        records=records,
        lines=summarise(records, arms=("off", "on"), categories=CATEGORIES),
    )  # fmt: skip


def printed(report: Report) -> str:
    file = io.StringIO()
    print_report(report, Console(file=file, width=60))
    return file.getvalue()


def test_the_figures_are_those_computed_by_hand() -> None:
    lines = {(line.category, line.arm): line for line in reported(recorded()).lines}
    assert list(lines) == [(c, a) for c in (*CATEGORIES, ALL) for a in ("off", "on")]
    off, on = lines[ALL, "off"], lines[ALL, "on"]
    assert off.ratios is None
    assert on.ratios is not None
    assert on.ratios.decode_speed is not None
    assert (on.ratios.decode_speed.count, on.ratios.decode_speed.estimate) == pytest.approx((8, 2.0))  # 0.8 / 0.4
    assert on.ratios.decode_speed.low == pytest.approx(2.0)
    assert on.ratios.request_speed is not None
    assert on.ratios.request_speed.estimate == pytest.approx(1.0 / 0.65)
    assert on.ratios.first_token is not None
    assert on.ratios.first_token.estimate == pytest.approx(1.25)
    assert on.ratios.throughput is not None
    assert on.ratios.throughput.estimate == pytest.approx(1.0 / 0.65)
    assert off.total_tokens_per_second == pytest.approx(5.0)
    assert off.seconds_per_token is not None
    assert (off.seconds_per_token.count, off.seconds_per_token.median) == pytest.approx((8, 0.2))
    assert off.gap_seconds is not None
    assert (off.gap_seconds.count, off.gap_seconds.median) == pytest.approx((16, 0.15))
    chat = lines["chat", "on"].ratios
    assert chat is not None
    assert chat.decode_speed is not None
    assert (chat.decode_speed.count, chat.decode_speed.low) == (4, None)


def test_acceptance_stages_bytes_and_processes_add_up() -> None:
    lines = {line.arm: line for line in reported(recorded()).lines if line.category == ALL}
    taken = lines["on"].acceptance
    assert taken.rate == 0.5
    assert taken.length == pytest.approx(1.0 + 2 / 3)
    assert taken.rate_by_position == (1.0,)  # two accepted at the first place in two rounds with a draft
    assert (taken.rounds, taken.draftless_rounds) == (24, 8)
    assert lines["on"].bytes_per_round == 50.0
    stages = lines["on"].stages
    assert stages is not None
    assert (stages.draft, stages.verify) == pytest.approx((0.02, 0.04))
    assert stages.rest == pytest.approx((0.65 - 0.35) / 5)
    assert lines["off"].acceptance.rate is None
    assert lines["off"].bytes_per_round is None
    assert lines["off"].cpu_seconds_per_1000_tokens == {"target": pytest.approx(100.0)}
    assert lines["off"].resident_bytes == {"target": 8 * 2.0**20}


def test_a_failed_request_takes_its_pair_out_and_fails_the_run() -> None:
    records = recorded()
    lost = records.observations.pop()  # of arm on
    records.runs[-1] = replace(records.runs[-1], complete=False)
    records.failures.append(Failure(arm="on", concurrency=1, prompt=lost.prompt, message="went away"))
    report = reported(records)
    line = next(line for line in report.lines if (line.category, line.arm) == (ALL, "on"))
    assert line.ratios is not None
    assert line.ratios.decode_speed is not None
    assert line.ratios.throughput is not None
    assert (line.num_requests, line.ratios.decode_speed.count, line.ratios.throughput.count) == (7, 7, 7)
    assert not report.passed
    assert "FAILED w:7, on, 1 at once: went away" in printed(report)


def test_where_nothing_was_drafted_a_warning_says_so() -> None:
    records = recorded()
    records.observations = [
        replace(each, timeline=replace(each.timeline, speculation=NOTHING)) for each in records.observations
    ]
    report = reported(records)
    report = replace(report, served=replace(report.served, status="degraded", reasons=("no draft service",)))
    assert "NOT ONE TOKEN WAS DRAFTED in on (the gateway is degraded: no draft service)" in " ".join(report.warnings())
    assert "NOT ONE TOKEN WAS DRAFTED" in printed(report)
    assert not any("DRAFTED" in warning for warning in reported(recorded()).warnings())


def test_what_weakens_the_figures_is_said() -> None:
    records = recorded()
    records.stopped, records.num_groups_done = "the time was up", 3
    records.runs = [replace(run, cpu_seconds={}) for run in records.runs]
    words = " ".join(reported(records, levels=(1, 8)).warnings())
    assert "the time was up after 3 of 8 groups" in words
    assert "a category has 4 prompts, so that not 8 of it" in words
    assert "no CPU time of the target" in words
    assert reported(recorded()).warnings() == []


def test_the_tables_hold_the_figures_and_where_they_are_from() -> None:
    shown = printed(reported(recorded()))
    for words in (
        "2.00 [2.00, 2.00]", "big-model at http://gateway (ready); model bundled", "target: engine torch", "c0ffee",
        "Some CPU", "8 prompts of w", "200 (200-200) 200", "1.67", "100.00",
    ):  # fmt: skip
        assert words in shown, words
    assert "gateway: " not in shown


def test_the_json_has_every_request_and_not_a_word_of_what_was_said() -> None:
    document = json.loads(json.dumps(reported(recorded()).document()))
    assert len(document["requests"]) == 16
    assert document["requests"][0]["speculation"]["rounds"] == 5
    assert document["requests"][0]["longest_gap_seconds"] == 0.2
    assert document["machine"]["commit"] == "c0ffee"
    assert document["arms"] == {"off": {"enabled": False}, "on": {"enabled": True}}
    assert "secret" not in json.dumps(document)


def test_a_run_without_an_answer_still_has_a_report(tmp_path: Path) -> None:
    records = Records(num_groups=4, failures=[Failure(arm="on", concurrency=1, prompt="w:1", message="no")])
    report = reported(records)
    assert "1 requests failed" in printed(report)
    assert report.document()["lines"] == []
    draw(report, tmp_path / "empty.svg")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture_is_written(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"chart.{suffix}"
    draw(reported(recorded()), file)
    assert file.read_bytes().startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"must end in \.svg or \.png"):
        check_chart(Path("chart.pdf"))
    with pytest.raises(InvalidRequest, match="cannot write"):
        draw(reported(recorded()), tmp_path / "missing" / "chart.svg")
