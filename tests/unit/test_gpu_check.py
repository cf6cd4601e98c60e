"""The GPU's check, on the CPU with a tiny model: that it runs, says what it saw, and fails when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from tandem.engine.static_decode import Step

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_without_a_gpu_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 0
    assert capsys.readouterr().out == "no CUDA device; nothing was checked\n"


def test_on_the_cpu_all_of_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == []
    assert report["rounds_alike"] == "5 of 5"
    assert max(report["logit_differences"].values()) < 1e-5
    names = [timing["name"] for timing in report["timings"]]
    assert names == ["prefill of 40", "1 at 20", "4 at 20", "1 x 1 at 20", "3 x 1 at 20", "1 x 5 at 20", "3 x 5 at 20"]
    assert [timing["name"] for timing in report["timings"] if timing["recorded_ms"] is None] == names[:1]
    assert all(timing["eager_ms"] > timing["floor_ms"] > 0 for timing in report["timings"])
    assert [draft["num_texts"] for draft in report["drafts"]] == [1, 3]
    assert all(draft["gone_on_ms"] > 0 for draft in report["drafts"])
    shown = capsys.readouterr().out
    assert "one step ms" in shown
    assert all(name in shown for name in names)


def test_a_step_that_cannot_be_recorded_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(step: Step) -> Step:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu_check, "as_it_is", refuse)
    assert gpu_check.main(["--device", "cpu"]) == 1
    assert "a step cannot be recorded" in capsys.readouterr().out


def test_recorded_logits_that_differ_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stale(step: Step) -> Step:
        first = step()
        return lambda: first

    monkeypatch.setattr(gpu_check, "as_it_is", stale)
    assert gpu_check.main(["--device", "cpu"]) == 1
    assert "differ from eager ones" in capsys.readouterr().out
