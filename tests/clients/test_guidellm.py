"""guidellm drives load: chats and completions, streamed, with the fields it always sends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("guidellm")

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

SECONDS = 15  # for each of two endpoints
STREAMS = 4
TOKENS = 30


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_thirty_seconds_of_load_from_four_streams_fail_no_request(url: str, tmp_path: Path, endpoint: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Story number {i}: once upon a time", "output_tokens_count": TOKENS} for i in range(500)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    report = tmp_path / "report.json"
    run = subprocess.run(
        [
            Path(sys.executable).with_name("guidellm"),
            "run",
            "--disable-progress",
            *("--backend", f"kind=openai_http,target={url},model=tandem,request_format={endpoint}"),
            *("--profile", f"kind=concurrent,streams={STREAMS}"),
            *("--constraint", f"kind=max_duration,seconds={SECONDS}"),
            *("--data", f"kind=json_file,path={prompts}"),
            *("--output", f"kind=json,path={report}"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    requests: dict[str, list[dict[str, Any]]] = json.loads(report.read_text())["benchmarks"][0]["requests"]
    assert requests["errored"] == []
    assert len(requests["incomplete"]) <= STREAMS  # what ran when the time was up
    assert len(requests["successful"]) >= 20
    assert {request["output_tokens"] for request in requests["successful"]} == {TOKENS}
