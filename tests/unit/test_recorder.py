"""The sample of prompts: what is in it, how much, for whose eyes, and that it never stands in a request's way."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.admission import Admission
from gateway.app import create_app
from gateway.metrics import GatewayMetrics
from gateway.recorder import PromptRecorder, entry_of
from gateway.schemas import ChatBody, CompletionBody
from gateway.settings import Settings
from tandem.bench.workload import load_workload
from tandem.errors import InvalidRequest
from tests.fakes import FakeFleet, alphabet
from tests.gateways import CHAT, COMPLETIONS


def chat(*contents: str, **more: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": text} for text in contents], **more})


async def test_what_is_asked_becomes_a_workload_and_what_is_refused_does_not(tmp_path: Path) -> None:
    file = tmp_path / "sample.jsonl"
    recorder = PromptRecorder(file, most=10)
    settings = Settings(num_draft_tokens=4)
    app = create_app(
        settings,
        FakeFleet.following(alphabet),
        GatewayMetrics(max_num_draft_tokens=settings.max_num_draft_tokens),
        admission=Admission(max_running=8, max_queued=8),
        recorder=recorder,
    )
    system = {"role": "system", "content": "Be short.", "name": "secret-name"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        for path, body, status in (
            (CHAT, {"messages": [system, {"role": "user", "content": "a"}], "max_tokens": 3}, 200),
            (COMPLETIONS, {"prompt": "bé", "max_tokens": 2}, 200),
            (COMPLETIONS, {"prompt": [97, 98], "max_tokens": 2}, 200),  # ids are no text
            (CHAT, {"messages": [{"role": "user", "content": "refused"}], "temperature": 9}, 400),
        ):
            assert (await http.post(path, json=body)).status_code == status
    recorder.close()
    prompts = load_workload(file).prompts
    assert [(prompt.opening, prompt.turns, prompt.max_tokens) for prompt in prompts] == [
        (({"role": "system", "content": "Be short."},), ("a",), 3),
        ((), ("bé",), 2),
    ]
    assert "secret" not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_it_is_bounded_and_what_was_there_counts(tmp_path: Path) -> None:
    file = tmp_path / "sample.jsonl"
    for round_ in range(2):
        recorder = PromptRecorder(file, most=5)
        for number in range(3):
            recorder.record(chat(f"{round_} {number}"))
        recorder.close()
    assert recorder.full
    said = [json.loads(line)["messages"][0]["content"] for line in file.read_text().splitlines()]
    assert said == ["0 0", "0 1", "0 2", "1 0", "1 1"]


def test_a_file_that_others_could_read_no_longer_can(tmp_path: Path) -> None:
    file = tmp_path / "sample.jsonl"
    file.touch(mode=0o644)
    PromptRecorder(file, most=1).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_link_is_not_followed_and_a_missing_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "link", tmp_path / "missing" / "sample.jsonl"):
        with pytest.raises(InvalidRequest, match="cannot record prompts"):
            PromptRecorder(path, most=1)


def test_what_a_workload_cannot_say_is_left_out() -> None:
    assert entry_of(chat("a", max_tokens=4)) == {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    ends_with_assistant = {"messages": [{"role": "assistant", "content": "a"}]}
    of_a_tool = {"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]}
    for body in (ends_with_assistant, of_a_tool, {"messages": [{"role": "user", "content": " "}]}):
        assert entry_of(ChatBody.model_validate(body)) is None
    assert entry_of(CompletionBody.model_validate({"prompt": ["a", "b"]})) is None


def test_nothing_is_recorded_unless_a_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().record_prompts is None
    monkeypatch.setenv("TANDEM_GATEWAY_RECORD_PROMPTS", "")
    assert Settings().record_prompts is None
