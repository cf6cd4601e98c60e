"""A streamed `/v1/completions` answer with token ids in and out, as Tandem and vLLM give it."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.peer import PeerFailed, Prompt, Result
from benchmarks.peers.streaming import StreamClient


def complete(
    client: StreamClient, prompt: Prompt, *, more: dict[str, Any], max_tokens: int, timeout_seconds: float
) -> Result:
    """The greedy answer, with what the last chunk's `speculation` says. `more` goes into the request."""
    body = {
        "prompt": list(prompt.token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    first: tuple[float, int] | None = None
    last_seconds, text, usage = 0.0, "", None
    report: dict[str, Any] = {}
    for event in client.post("/v1/completions", body, timeout_seconds=timeout_seconds):
        usage = event.content.get("usage") or usage
        report = event.content.get("speculation") or report
        for choice in event.content["choices"]:
            text += choice.get("text") or ""
            tokens = choice.get("token_ids") or []
            if first is None and tokens:
                first = event.seconds, len(tokens)
            last_seconds = event.seconds
    if usage is None or not last_seconds:
        raise PeerFailed("the answer ended without its usage")
    num_tokens = int(usage["completion_tokens"])
    first_seconds, first_num_tokens = first or (last_seconds, num_tokens)
    return Result(
        num_tokens=num_tokens,
        first_token_seconds=first_seconds,
        first_num_tokens=first_num_tokens,
        total_seconds=last_seconds,
        text=text,
        drafted=report.get("drafted"),
        accepted=report.get("accepted"),
        num_calls=report.get("rounds"),
    )
