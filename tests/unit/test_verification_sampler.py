"""Asking a gateway for samples: order, errors, a gateway that is busy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tandem.errors import InvalidRequest, Unavailable
from tandem.verification.plan import Request
from tandem.verification.sampler import Sampler

Answer = Callable[[dict[str, Any]], httpx.Response]


def request(seed: int) -> Request:
    return Request(prompt="x", max_tokens=1, parameters={}, seed=seed)


def good(body: dict[str, Any]) -> httpx.Response:
    choice = {"token_ids": [body["seed"]], "prompt_token_ids": [1, 2]}
    return httpx.Response(200, json={"choices": [choice], "speculation": {"drafted": 2, "accepted": 1}})


def refused(param: str, message: str = "no") -> httpx.Response:
    return httpx.Response(400, json={"error": {"message": message, "param": param, "type": "x", "code": None}})


def sampler(answer: Answer) -> Sampler:
    transport = httpx.MockTransport(lambda sent: answer(json.loads(sent.content)))
    return Sampler("http://gateway", api_key=None, concurrency=4, transport=transport)


async def test_samples_come_in_the_order_of_their_requests() -> None:
    ticks: list[None] = []
    async with sampler(good) as asked:
        samples = await asked.samples(map(request, range(20)), done=lambda: ticks.append(None))
        opening = await asked.pilot([request(3)], done=lambda: None)
    assert [sample.token_ids for sample in samples] == [(seed,) for seed in range(20)]
    assert (samples[0].drafted, samples[0].accepted, len(ticks)) == (2, 1, 20)
    assert opening.prompt_ids == (1, 2)


async def test_a_busy_gateway_is_asked_again() -> None:
    busy = iter([True, False])

    def answer(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(429, headers={"retry-after": "0"}) if next(busy, False) else good(body)

    async with sampler(answer) as asked:
        assert len(await asked.samples([request(1)], done=lambda: None)) == 1


@pytest.mark.parametrize(
    ("response", "error", "words"),
    [
        (refused("top_k", "top_k is bad"), InvalidRequest, "400: top_k is bad"),
        (httpx.Response(503, text="later"), Unavailable, "503: later"),
        (httpx.Response(401, json={"error": {"message": "who"}}), Unavailable, "who; give a key with --api-key"),
        (httpx.Response(200, json={"choices": []}), Unavailable, "no token ids"),
    ],
)
async def test_what_is_no_answer_is_one_error(response: httpx.Response, error: type[Exception], words: str) -> None:
    async with sampler(lambda _: response) as asked:
        with pytest.raises(error, match=words):
            await asked.samples(map(request, range(8)), done=lambda: None)


async def test_a_gateway_that_is_away_is_unavailable() -> None:
    def answer(_: dict[str, Any]) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with sampler(answer) as asked:
        with pytest.raises(Unavailable, match="does not answer"):
            await asked.samples([request(1)], done=lambda: None)


async def test_a_drafter_is_there_unless_its_own_field_is_refused() -> None:
    async with sampler(lambda body: good(body)) as asked:
        assert await asked.has_drafter("model", request=request(1))
    async with sampler(lambda _: refused("speculation.drafter")) as asked:
        assert not await asked.has_drafter("model", request=request(1))
    async with sampler(lambda _: refused("seed")) as asked:
        with pytest.raises(InvalidRequest):
            await asked.has_drafter("model", request=request(1))
