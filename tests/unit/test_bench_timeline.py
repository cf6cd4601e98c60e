"""Reading one answer's stream: which chunk came when, and what the gateway said of it. No clock is involved."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tandem.bench.client import BenchClient
from tandem.bench.timeline import RoundTrace, added, read_timeline
from tandem.errors import InvalidRequest, TandemError, Unavailable

SPECULATION = {
    "rounds": 3,
    "draftless_rounds": 1,
    "drafted": 6,
    "accepted": 2,
    "accepted_per_position": [2, 0],
    "draft_seconds": 0.25,
    "verify_seconds": 0.5,
    "network_seconds": 0.125,
    "bytes_sent": 640,
}


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def piece(content: str | None, **choice: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {} if content is None else {"content": content}, **choice}]})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
LAST = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "speculation": SPECULATION})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
DONE = b"data: [DONE]\n\n"


def test_times_are_those_of_the_chunks_that_complete_an_event() -> None:
    first = piece("He")
    timeline = read_timeline(
        [
            (0.5, ROLE + first[:10]),
            (1.0, first[10:]),
            (1.5, b": ping\n\n"),
            (2.0, piece("llo")),
            (4.0, piece("!") + LAST + USAGE),
            (9.0, DONE),
        ]
    )
    assert timeline.text == "Hello!"
    assert (timeline.first_seconds, timeline.last_seconds) == (1.0, 4.0)
    assert timeline.gap_seconds == (1.0, 2.0)
    assert (timeline.num_prompt_tokens, timeline.num_tokens, timeline.finish_reason) == (7, 5, "length")
    assert timeline.seconds_per_token == 0.75  # four tokens in the three seconds after the first
    assert timeline.tokens_per_second == 1.25  # five in four
    assert timeline.speculation.accepted_per_position == (2, 0)


def test_a_trace_s_rounds_are_read() -> None:
    """Without a trace there are none, as with the answers above."""
    entry: dict[str, Any] = {
        "prefill": False, "drafted": 4, "accepted": 2, "prepared": True,
        "draft_seconds": 0.25, "verify_seconds": 0.5, "network_seconds": 0.125,
    }  # fmt: skip
    traced = {**SPECULATION, "round_trace": [{**entry, "prefill": True, "drafted": 0, "accepted": 0}, entry]}
    last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "speculation": traced})
    rounds = read_timeline([(1.0, ROLE + piece("x") + last + USAGE + DONE)]).rounds
    assert [(each.prefill, each.drafted, each.accepted) for each in rounds] == [(True, 0, 0), (False, 4, 2)]
    assert rounds[1] == RoundTrace(**entry)
    assert read_timeline([(1.0, ROLE + piece("x") + LAST + USAGE + DONE)]).rounds == ()


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}})
    timeline = read_timeline([(2.0, ROLE + LAST + usage + DONE)])
    assert (timeline.first_seconds, timeline.text, timeline.gap_seconds) == (2.0, "", ())
    assert timeline.seconds_per_token is None
    assert timeline.tokens_per_second == 0.5


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (ROLE + piece("x"), "before the answer's end"),
        (ROLE + LAST + USAGE, "before the answer's end"),
        (ROLE + DONE, "before the answer's end"),
        (ROLE + event({"error": {"message": "the target is gone"}}), "broke off: the target is gone"),
        (b"data: nonsense\n\n", "no JSON object"),
        (ROLE + LAST + DONE, "no usage"),
        (ROLE + piece(None, finish_reason="stop") + USAGE + DONE, "no `speculation`"),
    ],
)
def test_a_stream_that_is_no_whole_answer_is_an_error(stream: bytes, words: str) -> None:
    with pytest.raises(TandemError, match=words):
        read_timeline([(1.0, stream)])


def test_figures_add_up_whatever_their_lengths() -> None:
    one = read_timeline([(1.0, ROLE + LAST + USAGE + DONE)]).speculation
    longer = event(
        {
            "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
            "speculation": {**SPECULATION, "accepted_per_position": [1, 1, 1]},
        }
    )
    other = read_timeline([(1.0, ROLE + longer + USAGE + DONE)]).speculation
    total = added([one, other])
    assert total.accepted_per_position == (3, 1, 1)
    assert (total.rounds, total.drafted, total.bytes_sent, total.verify_seconds) == (6, 12, 1280, 1.0)
    assert added([]).rounds == 0


def client(response: httpx.Response) -> BenchClient:
    return BenchClient("http://gateway", api_key="k", concurrency=2, transport=httpx.MockTransport(lambda _: response))


async def test_an_answer_is_read_from_http() -> None:
    async with client(httpx.Response(200, content=ROLE + piece("Hi") + LAST + USAGE + DONE)) as asked:
        timeline = await asked.answer({})
    assert (timeline.text, timeline.num_tokens) == ("Hi", 5)
    assert timeline.last_seconds >= timeline.first_seconds >= 0.0


@pytest.mark.parametrize(
    ("response", "error", "words"),
    [
        (httpx.Response(400, json={"error": {"message": "speculation.k is unknown"}}), InvalidRequest, "k is unknown"),
        (httpx.Response(429, json={"error": {"message": "full"}}), Unavailable, "full; a smaller --concurrency"),
        (httpx.Response(401, json={"error": {"message": "who"}}), Unavailable, "give a key with --api-key"),
        (httpx.Response(502, text="bad gateway"), Unavailable, "502: bad gateway"),
    ],
)
async def test_a_refusal_says_what_is_to_be_done(response: httpx.Response, error: type[Exception], words: str) -> None:
    async with client(response) as asked:
        with pytest.raises(error, match=words):
            await asked.answer({})


async def test_what_is_no_gateway_is_told_apart() -> None:
    async with client(httpx.Response(200, text="<html>")) as asked:
        with pytest.raises(Unavailable, match="is it the right --url"):
            await asked.model()
    async with client(httpx.Response(200, json={"data": [{"id": "big"}, {"id": "tandem"}]})) as asked:
        assert (await asked.model())["id"] == "big"
    async with client(httpx.Response(200, json={"status": "degraded", "reasons": ["no draft"]})) as asked:
        assert await asked.readiness() == ("degraded", ("no draft",))
