"""Several answers to one request, their seeds, and the rule that verifies drafts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.seeds import draw_seed, seed_of_choice
from tandem.errors import Unavailable
from tandem.types import SessionStart, Verification
from tests.fakes import FakeFleet, alphabet, eventually, says
from tests.gateways import CHAT, COMPLETIONS, HELLO, gateway, text_of

pytestmark = pytest.mark.usefixtures("quiet_logs")


def by_seed(start: SessionStart) -> bytes:
    """An answer that shows its seed, as a sampler's does."""
    return str(start.seed).encode()


async def test_n_answers_each_with_a_seed_of_its_own() -> None:
    async with gateway(by_seed) as served:
        for path, body in ((COMPLETIONS, {"prompt": "a", "max_tokens": 40}), (CHAT, {"messages": HELLO})):
            answer = (await served.post(path, {**body, "n": 3, "seed": 5})).json()
            texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
            assert texts == [str(seed_of_choice(5, index)) for index in range(3)]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
            assert answer["speculation"]["seed"] == 5
            alone = (await served.post(path, {**body, "seed": 5})).json()["choices"][0]
            assert (alone.get("text") or alone["message"]["content"]) == texts[0]
            events = await served.events(path, {**body, "n": 3, "seed": 5})  # B1: asserts one [DONE]
            assert [text_of(events, index=index) for index in range(3)] == texts
            finished = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
            assert sorted(finished) == [0, 1, 2]


async def test_answers_to_several_prompts_come_prompt_by_prompt() -> None:
    async with gateway(alphabet) as served:
        body = {"prompt": ["a", "x"], "n": 2, "max_tokens": 2, "seed": 1}
        choices = (await served.post(COMPLETIONS, body)).json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "bc"), (1, "bc"), (2, "yz"), (3, "yz")]
    assert len({start.seed for start in served.fleet.target.starts}) == 4


def test_the_seed_of_a_choice_is_a_pure_function_and_the_first_is_the_requests() -> None:
    assert seed_of_choice(7, 0) == 7
    assert seed_of_choice(-1, 0) == 2**64 - 1
    seeds = {seed_of_choice(seed, index) for seed in range(-50, 50) for index in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of_choice(7, 1) == 7026320614825720818  # clients store seeds: this must not change
    assert draw_seed() != draw_seed()


async def test_usage_and_counters_count_each_prompt_once_and_all_answers() -> None:
    async with gateway(alphabet) as served:
        body = {"prompt": [[97, 98], [120]], "n": 3, "max_tokens": 4}
        usage = (await served.post(COMPLETIONS, body)).json()["usage"]
        events = await served.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert usage == {"prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27} == events[-1]["usage"]
        assert await served.metric("tandem_prompt_tokens_total") == 6
        assert await served.metric("tandem_generation_tokens_total") == 48


async def test_the_other_answers_start_when_the_first_has_begun() -> None:
    """The prompt is then in the target's prefix cache: n answers cost one prefill."""
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with gateway(fleet) as served:
        body = {"prompt": ["a", "x"], "n": 3, "max_tokens": 3}
        request = asyncio.create_task(served.post(COMPLETIONS, body))
        await eventually(lambda: fleet.target.num_open == 2)
        await asyncio.sleep(0.02)
        assert [start.token_ids[-1] for start in fleet.target.starts] == [97, 120]
        fleet.target.gate.set()
        assert len((await request).json()["choices"]) == 6
    assert len(fleet.target.starts) == 6


async def test_where_the_first_answer_fails_the_others_do_not_wait_for_ever() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (0, Unavailable("gone"))
    async with gateway(fleet) as served:
        response = await asyncio.wait_for(served.post(COMPLETIONS, {"prompt": "a", "n": 4}), 5)
    assert response.status_code == 503
    assert len(fleet.target.starts) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": ["a"] * 5}, "prompt"), ({"prompt": "a", "n": 5}, "n"), ({"prompt": ["a", "b"], "n": 3}, "n")],
)
async def test_l3_answers_to_one_request_are_bounded(body: dict[str, Any], param: str) -> None:
    async with gateway(alphabet, max_n=4) as served:
        refused = await served.post(COMPLETIONS, body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await served.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2})).status_code == 200
        assert (await served.post(CHAT, {"messages": HELLO, "n": 5})).json()["error"]["param"] == "n"


# --- the rule


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("seed", "wish", "rule"),
    [
        (None, "auto", "rejection"),
        (3, "auto", "coupled"),
        (3, "rejection", "rejection"),
        (3, "coupled", "coupled"),
        (None, "coupled", "coupled"),
        (None, "rejection", "rejection"),
    ],
)
async def test_a_seed_couples_and_the_response_names_the_rule(
    enabled: bool, seed: int | None, wish: str, rule: str
) -> None:
    """With speculation off too: its text with a seed is that of plain decoding."""
    body = {"prompt": "a", "seed": seed, "speculation": {"verification": wish, "enabled": enabled}}
    async with gateway(says("hello")) as served:
        report = (await served.post(COMPLETIONS, body)).json()["speculation"]
        start = served.fleet.target.starts[0]
        assert await served.metric("tandem_verification_answers_total", verification=rule) == 1
    assert report["verification"] == rule == start.verification.value
    assert report["seed"] == start.seed == (seed or report["seed"])


async def test_the_rule_is_the_same_for_all_answers() -> None:
    async with gateway(says("hello")) as served:
        await served.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": 1})
    assert {start.verification for start in served.fleet.target.starts} == {Verification.COUPLED}


async def test_f1_a_top_p_too_small_for_float32_is_as_good_as_the_smallest() -> None:
    """To float32 it would be 0, which is no top_p; the law is that of the most likely tokens alone in both cases."""
    async with gateway(says("hello")) as served:
        assert (await served.post(COMPLETIONS, {"prompt": "a", "top_p": 1e-300})).status_code == 200
    assert 0 < served.fleet.target.starts[0].sampling.top_p < 1e-36
