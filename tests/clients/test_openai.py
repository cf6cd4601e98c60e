"""The official client, synchronous and not: answers, streams, and errors that reach the user with their message."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

MESSAGES: Any = [{"role": "user", "content": "Tell me of the fox. 漢字🙂"}]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def _chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "tandem", "messages": MESSAGES, "max_tokens": 40} | more)


def test_models_are_listed_and_each_can_be_fetched(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert "tandem" in names
    assert [client.models.retrieve(name).id for name in names] == names
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("nope")


def test_a_chat_and_its_stream_say_the_same_and_count_the_same(client: openai.OpenAI) -> None:
    """Bugs A7, B4, B5, B7, B8, C1, C5."""
    whole = _chat(client, temperature=0)
    chunks = list(_chat(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    *middle, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in middle] == ["assistant"] + [None] * (len(middle) - 1)
    assert [chunk.choices[0].finish_reason for chunk in middle[:-1]] == [None] * (len(middle) - 1)
    assert middle[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.usage for chunk in middle} == {None}
    assert (last.choices, last.usage) == ([], whole.usage)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert middle[-1].speculation["rounds"] > 0


def test_the_stream_helper_collects_the_whole_message(client: openai.OpenAI) -> None:
    """Bug B7: it joins deltas, and so would join a role that comes with every chunk."""
    whole = _chat(client, temperature=0).choices[0].message
    with client.chat.completions.stream(model="tandem", messages=MESSAGES, max_tokens=40, temperature=0) as stream:
        done = [event.content for event in stream if event.type == "content.done"]
        message = stream.current_completion_snapshot.choices[0].message
    assert done == [whole.content]
    assert (message.role, message.content) == ("assistant", whole.content)


def test_completions_and_their_stream_say_the_same(client: openai.OpenAI) -> None:
    """Bug B15: the last chunk of a completions stream has its finish_reason, and usage comes."""
    arguments: Any = {"model": "tandem", "prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_vllms_extra_fields_pass_through_extra_body(client: openai.OpenAI) -> None:
    answer = _chat(
        client, temperature=0, extra_body={"ignore_eos": True, "return_token_ids": True, "speculation": {"trace": True}}
    )
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens == 40
    assert [token["token_id"] for token in answer.choices[0].trace] == answer.choices[0].token_ids


def test_a_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI) -> None:
    first, second, other = (_chat(client, seed=seed).choices[0].message.content for seed in (7, 7, 8))
    assert first == second != other


def test_chat_logprobs_have_a_row_for_every_token(client: openai.OpenAI) -> None:
    """Bugs G1, G6: never empty, never all zero, and bytes that join to the text."""
    content = {"logprobs": True, "temperature": 0, "stop": ["\n\n\n"]}
    answer = _chat(client, **content, top_logprobs=2)
    rows = answer.choices[0].logprobs.content
    assert len(rows) == answer.usage.completion_tokens
    assert all(len(row.top_logprobs) == 2 and row.logprob <= row.top_logprobs[0].logprob + 1e-6 for row in rows)
    assert any(row.logprob < -1e-6 for row in rows)
    streamed = [
        row
        for chunk in _chat(client, **content, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs is not None
        for row in chunk.choices[0].logprobs.content
    ]
    assert [row.token for row in streamed] == [row.token for row in rows]
    assert all(row.top_logprobs == [] for row in _chat(client, **content).choices[0].logprobs.content)


def test_completion_logprobs_and_echo_score_a_prompt(client: openai.OpenAI) -> None:
    """As lm-evaluation-harness asks: no new token, the prompt's log-probabilities."""
    answer = client.completions.create(model="tandem", prompt="fox", max_tokens=0, echo=True, logprobs=1)
    choice: Any = answer.choices[0]  # the client's types do not know that the first token has no log-probability
    first, *rest = choice.logprobs.token_logprobs
    assert choice.text == "fox"
    assert first is None
    assert len(rest) == 2
    assert all(value < 0 for value in rest)


def test_n_answers_come_as_n_choices(client: openai.OpenAI) -> None:
    """Bug B1: in a stream too, with one [DONE]."""
    assert [choice.index for choice in _chat(client, n=3, seed=1).choices] == [0, 1, 2]
    assert {chunk.choices[0].index for chunk in _chat(client, n=3, seed=1, stream=True)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("more", "error", "message", "param"),
    [
        ({"temperature": 7}, openai.BadRequestError, "temperature", "temperature"),
        ({"top_p": 0}, openai.BadRequestError, "top_p", "top_p"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "maximum context length is 256 tokens", "messages"),
        ({"model": "nope"}, openai.NotFoundError, "'nope' does not exist", "model"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format", "response_format"),
        ({"messages": []}, openai.BadRequestError, "messages", "messages"),
        ({"stream": True, "stop": [""]}, openai.BadRequestError, "stop", "stop"),
    ],
)
def test_errors_keep_their_class_message_and_parameter(
    client: openai.OpenAI, more: dict[str, Any], error: type[openai.APIStatusError], message: str, param: str
) -> None:
    """Bug I6."""
    with pytest.raises(error, match=message) as caught:
        _chat(client, **more)
    assert caught.value.param == param
    assert caught.value.request_id


def test_an_over_long_prompt_has_openais_code(client: openai.OpenAI) -> None:
    """Bugs E6, E7."""
    with pytest.raises(openai.BadRequestError) as caught:
        _chat(client, messages=[{"role": "user", "content": "long " * 200}])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_times_out_gets_its_own_error_and_the_next_request_answers(
    client: openai.OpenAI, stream: bool
) -> None:
    hasty = client.with_options(timeout=0.001)
    with pytest.raises(openai.APITimeoutError):
        list(_chat(hasty, max_tokens=200, stream=stream))
    assert _chat(client, max_tokens=1).usage.completion_tokens == 1


def test_leaving_a_stream_early_is_no_harm(client: openai.OpenAI) -> None:
    stream = _chat(client, max_tokens=200, stream=True)
    next(stream)
    stream.close()
    assert _chat(client, max_tokens=1).usage.completion_tokens == 1


async def test_the_asynchronous_client_runs_eight_streams_at_once(url: str, client: openai.OpenAI) -> None:
    """Bug A8."""
    prompts = [f"Story number {i}: " for i in range(8)]

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as many:

        async def say(prompt: str) -> str:
            chunks = await many.completions.create(
                model="tandem", prompt=prompt, max_tokens=40, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        together = await asyncio.gather(*map(say, prompts))

    def say_alone(prompt: str) -> str:
        answer = client.completions.create(model="tandem", prompt=prompt, max_tokens=40, temperature=0)
        return answer.choices[0].text

    assert together == [await asyncio.to_thread(say_alone, prompt) for prompt in prompts]
