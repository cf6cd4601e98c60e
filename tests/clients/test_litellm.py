"""LiteLLM, through its `openai/` provider."""

from __future__ import annotations

from typing import Any

import pytest

litellm = pytest.importorskip("litellm")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(300),
]


@pytest.fixture
def arguments(url: str) -> dict[str, Any]:
    return {
        "model": "openai/tandem",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "Tell me of the fox. 漢字🙂"}],
        "max_tokens": 30,
        "temperature": 0,
        "num_retries": 0,
        "timeout": 60,
    }


def test_completion_and_stream_say_and_count_the_same(arguments: dict[str, Any]) -> None:
    """Bugs C4, A4: the chunk with usage has no choices, and no character is lost."""
    whole = litellm.completion(**arguments)
    chunks = list(litellm.completion(**arguments, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert [usage.total_tokens for usage in usages] == [whole.usage.total_tokens]


async def test_acompletion_says_the_same(arguments: dict[str, Any]) -> None:
    whole = litellm.completion(**arguments)
    chunks = await litellm.acompletion(**arguments, stream=True)
    said = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    assert said == whole.choices[0].message.content


def test_text_completion_works(arguments: dict[str, Any]) -> None:
    del arguments["messages"]
    arguments["model"] = "text-completion-openai/tandem"
    answer = litellm.text_completion(**arguments, prompt="Once upon a time")
    assert answer.choices[0].text
    assert answer.usage.completion_tokens <= 30


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"max_tokens": 100_000}, "ContextWindowExceededError", "maximum context length is 256 tokens"),
        ({"temperature": 7}, "BadRequestError", "temperature"),
        ({"model": "openai/nope"}, "NotFoundError", "'nope' does not exist"),
    ],
)
def test_errors_become_litellms_own_classes(
    arguments: dict[str, Any], more: dict[str, Any], error: str, message: str
) -> None:
    with pytest.raises(getattr(litellm.exceptions, error), match=message):
        litellm.completion(**arguments | more)
