"""langchain-openai's ChatOpenAI."""

from __future__ import annotations

from typing import Any

import openai
import pytest

langchain_openai = pytest.importorskip("langchain_openai")

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

PROMPT = "Tell me of the fox."


@pytest.fixture
def chat(url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="tandem", max_tokens=30, temperature=0, max_retries=0, timeout=60
    )


def test_invoke_and_stream_say_the_same(chat: Any) -> None:
    whole = chat.invoke(PROMPT)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] <= 30
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert "".join(chunk.content for chunk in chat.stream(PROMPT)) == whole.content


def test_a_stream_brings_usage_where_it_is_asked_for(chat: Any) -> None:
    """Bug C4: the chunk with usage has no choices."""
    whole = chat.invoke(PROMPT)
    seen = [chunk.usage_metadata for chunk in chat.stream(PROMPT, stream_usage=True) if chunk.usage_metadata]
    assert seen == [whole.usage_metadata]
    assert not any(chunk.usage_metadata for chunk in chat.stream(PROMPT))  # LangChain sends no stream_options then


async def test_ainvoke_and_astream_say_the_same(chat: Any) -> None:
    whole = await chat.ainvoke(PROMPT)
    assert "".join([chunk.content async for chunk in chat.astream(PROMPT)]) == whole.content


def test_a_stop_string_ends_the_text_before_it(chat: Any) -> None:
    text = chat.invoke(PROMPT).content
    stop = text[5:7]
    assert chat.invoke(PROMPT, stop=[stop]).content == text[: text.index(stop)]


def test_a_seed_gives_the_same_text(chat: Any) -> None:
    warm = chat.bind(seed=5, temperature=1.0)
    assert warm.invoke(PROMPT).content == warm.invoke(PROMPT).content


def test_logprobs_come_in_the_response_metadata(chat: Any) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(PROMPT)
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]


def test_f13_an_empty_logit_bias_is_accepted(chat: Any) -> None:
    assert chat.bind(logit_bias={}).invoke(PROMPT).content == chat.invoke(PROMPT).content


def test_an_over_long_prompt_is_an_error_that_says_so(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as caught:
        chat.invoke("long " * 200)
    assert caught.value.code == "context_length_exceeded"
