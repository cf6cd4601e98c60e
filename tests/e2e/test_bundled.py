"""The bundled model, end to end: sensible answers, and the same ones with speculation as without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.prompts import spec_bench
from tests.stack import Stack

pytestmark = pytest.mark.bundled


@pytest.fixture
def client(bundled: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0, timeout=300)


def _asked(stack: Stack, prompt: str, *, max_tokens: int, **speculation: Any) -> dict[str, Any]:
    response = stack.client.post(
        f"{stack.url}/v1/chat/completions",
        json={
            "model": "tandem",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "speculation": speculation,
        },
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _chat(stack: Stack, prompt: str, *, max_tokens: int, **speculation: Any) -> list[int]:
    ids: list[int] = _asked(stack, prompt, max_tokens=max_tokens, **speculation)["choices"][0]["token_ids"]
    return ids


def test_a_streamed_chat_says_something_sensible(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tandem",
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, finish = "", None, None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        usage = chunk.usage or usage
    assert "light" in text or "scatter" in text, text
    assert usage is not None
    assert usage.completion_tokens <= 60
    assert finish in ("length", "stop")


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_greedy_answers_to_spec_bench_are_those_of_plain_decoding(bundled: Stack, drafter: str) -> None:
    """A sample; `make prove` runs 80 prompts with 128 tokens each."""
    for prompt in spec_bench(4):
        plain = _chat(bundled, prompt, max_tokens=32, enabled=False)
        assert _chat(bundled, prompt, max_tokens=32, drafter=drafter) == plain


def test_the_bundled_draft_is_of_use(bundled: Stack) -> None:
    """Of these answers it foretells 103 of 246 tokens. Were it put together wrong, it would foretell hardly any."""
    drafted = accepted = 0
    for prompt in spec_bench(8):
        told = _asked(bundled, prompt, max_tokens=48, drafter="model", num_draft_tokens=1)["speculation"]
        drafted, accepted = drafted + told["drafted"], accepted + told["accepted"]
    assert accepted > 0.3 * drafted > 60


def test_sixteen_concurrent_answers_are_those_given_one_by_one(bundled: Stack) -> None:
    prompts = [f"Say something about the number {i}." for i in range(16)]
    alone = [_chat(bundled, prompt, max_tokens=12, drafter="ngram") for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: _chat(bundled, prompt, max_tokens=12, drafter="ngram"), prompts))
    assert together == alone
    assert len({tuple(ids) for ids in alone}) > 8


def test_the_openai_client_gets_answers_and_its_own_exceptions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tandem", prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert {"tandem", "SmolLM2-135M-Instruct.Q4_1"} == {model.id for model in client.models.list()}
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="8192") as too_long:
        client.completions.create(model="tandem", prompt="word " * 9000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model="tandem", messages=[{"role": "user", "content": "x"}], temperature=9)
    assert bad.value.param == "temperature"
