"""What examples/ holds runs, and prints what it promises."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.stack import Stack

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(*command: str | Path) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_curl_sh_shows_an_answer_a_stream_and_the_same_text_without_speculation(stack: Stack) -> None:
    lines = _run(EXAMPLES / "curl.sh", stack.url).splitlines()
    ready, chat, with_drafts, without = (json.loads(line) for line in lines if line.startswith("{"))
    assert ready["status"] == "ready"
    assert chat["object"] == "chat.completion"
    assert lines.count("data: [DONE]") == 1
    assert with_drafts["choices"] == without["choices"]
    assert with_drafts["speculation"]["drafted"] > 0
    assert without["speculation"]["drafted"] == 0


def test_curl_sh_says_so_when_nothing_listens() -> None:
    run = subprocess.run(
        [EXAMPLES / "curl.sh", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode != 0
    assert "127.0.0.1" in run.stderr


def test_stream_client_prints_the_answer_and_the_report(stack: Stack) -> None:
    printed = _run(
        sys.executable, EXAMPLES / "stream_client.py", "Tell me of the fox.", "--url", stack.url, "--max-tokens", "40"
    )
    answer, report = printed.rsplit("\n\n", 1)
    assert answer
    found = re.fullmatch(
        r"(\d+) of (\d+) drafted tokens were accepted: (\d+\.\d) tokens for each of the target's (\d+) steps\.\n",
        report,
    )
    assert found is not None, report
    assert 0 < int(found[1]) <= int(found[2])
