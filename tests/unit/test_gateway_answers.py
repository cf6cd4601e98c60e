"""The gateway over a real socket, with scripted services behind it: what answers look like, to any client."""

from __future__ import annotations

import openai
import pytest

from tandem.errors import TimedOut
from tests.fakes import (
    BOS,
    END,
    MODEL_ID,
    START,
    FakeFleet,
    alphabet,
    says,
    tokens,
)
from tests.gateways import (
    CHAT,
    COMPLETIONS,
    HELLO,
    gateway,
    official_client,
    text_of,
)

pytestmark = pytest.mark.usefixtures("quiet_logs")


# --- the official client


async def test_the_official_client_reads_a_completion() -> None:
    async with official_client(alphabet) as (client, _):
        answer = await client.completions.create(model="tandem", prompt="a", max_tokens=5)
    assert answer.choices[0].text == "bcdef"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == "tandem"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)  # BOS and a


async def test_the_official_client_reads_a_chat() -> None:
    async with official_client(says("hello")) as (client, _):
        answer = await client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": "x"}])
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6  # five letters and the end token


async def test_b7_b8_the_official_client_streams_a_chat_with_usage() -> None:
    async with official_client(says("hello")) as (client, _):
        stream = await client.chat.completions.create(
            model="tandem",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.created for chunk in chunks} == {chunks[0].created}
    assert {chunk.model for chunk in chunks} == {"tandem"}
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", *[None] * (len(chunks) - 2)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [*[None] * (len(chunks) - 2), "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


async def test_the_official_clients_stream_helper_reads_a_chat() -> None:
    async with official_client(says("hello")) as (client, _):
        async with client.chat.completions.stream(
            model="tandem", messages=[{"role": "user", "content": "x"}]
        ) as stream:
            answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "hello"


async def test_i5_i6_the_official_client_gets_404_and_400_with_the_message_kept() -> None:
    async with official_client(alphabet) as (client, _):
        with pytest.raises(openai.NotFoundError, match="'nope' does not exist") as unknown:
            await client.completions.create(model="nope", prompt="a")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="top_p") as bad:
            await client.completions.create(model="tandem", prompt="a", top_p=0)
        assert bad.value.param == "top_p"
        assert bad.value.request_id


async def test_b13_a_failure_in_mid_stream_raises_in_the_official_client() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (6, TimedOut("the target did not answer"))
    async with official_client(fleet) as (client, served):
        stream = await client.completions.create(model="tandem", prompt="a", max_tokens=50, stream=True)
        seen = ""
        with pytest.raises(openai.APIError, match="did not answer") as failure:  # noqa: PT012
            async for chunk in stream:
                seen += chunk.choices[0].text
        assert failure.value.code == "timeout"
        assert seen == "bcdefg"
        assert await served.metric("tandem_requests_total", finish_reason="error") == 1
        # J15: and the next request is fine.
        fleet.target.fail_at = None
        await client.completions.create(model="tandem", prompt="a", max_tokens=5)


# --- shapes


async def test_b4_b5_b10_every_chunk_has_a_finish_reason_and_only_the_last_a_value() -> None:
    async with gateway(alphabet) as served:
        for path, body in (
            (COMPLETIONS, {"prompt": "a", "max_tokens": 9}),
            (CHAT, {"messages": HELLO, "max_tokens": 9}),
        ):
            events = await served.events(path, body)
            choices = [event["choices"][0] for event in events]
            assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "length"]
            last = choices[-1]
            assert last.get("text", "") == "" == last.get("delta", {}).get("content", "")
            assert all("usage" not in event for event in events)


async def test_d11_no_chunk_in_between_is_without_text() -> None:
    async with gateway(says("a ST b STO c")) as served:
        events = await served.events(COMPLETIONS, {"prompt": "a", "stop": ["STOP"], "max_tokens": 99})
        assert all(event["choices"][0]["text"] for event in events[:-1])
        assert text_of(events) == "a ST b STO c"


async def test_c1_c4_c5_b15_usage_comes_once_in_a_chunk_of_its_own_and_equals_the_documents() -> None:
    async with gateway(says("hello")) as served:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
            document = (await served.post(path, body)).json()
            events = await served.events(path, {**body, "stream_options": {"include_usage": True}})
            assert [event["usage"] for event in events] == [*[None] * (len(events) - 1), document["usage"]]
            assert events[-1]["choices"] == []
            assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_continuous_usage_counts_what_has_been_sent() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with gateway(alphabet) as served:
        body = {"prompt": "a", "max_tokens": 6, "return_token_ids": True, "stream_options": options}
        events = await served.events(COMPLETIONS, body)
    sent = 0
    for event in events[:-1]:
        sent += len(event["choices"][0]["token_ids"])
        assert event["usage"]["completion_tokens"] == sent
    assert events[-1]["usage"]["completion_tokens"] == sent == 6


@pytest.mark.parametrize("stop", [None, "hij", ["zzz", "ij"]])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 16])
async def test_d2_a7_c5_stream_and_document_say_the_same(stop: object, num_draft_tokens: int) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 15,
        "stop": stop,
        "return_token_ids": True,
        "speculation": {"num_draft_tokens": num_draft_tokens, "trace": True},
    }
    async with gateway(FakeFleet.following(alphabet, wrong_at=lambda position: position % 5 == 3)) as served:
        document = (await served.post(COMPLETIONS, body)).json()["choices"][0]
        events = await served.events(COMPLETIONS, body)
        plain = (await served.post(COMPLETIONS, {**body, "speculation": {"enabled": False}})).json()["choices"][0]
    choices = [event["choices"][0] for event in events]
    assert text_of(events) == document["text"] == plain["text"]
    assert document["text"] == ("bcdefghijklmnop" if stop is None else "bcdefg" if stop == "hij" else "bcdefgh")
    assert [i for choice in choices for i in choice["token_ids"]] == document["token_ids"] == plain["token_ids"]
    assert [t for choice in choices for t in choice["trace"]] == document["trace"]
    assert "".join(token["text"] for token in document["trace"]) == document["text"]
    assert choices[-1]["finish_reason"] == document["finish_reason"] == ("length" if stop is None else "stop")


async def test_d4_d5_d8_everything_ends_at_a_stop_in_the_middle_of_a_long_draft() -> None:
    async with gateway(alphabet) as served:
        body = {
            "prompt": "a",
            "max_tokens": 50,
            "stop": "ef",
            "return_token_ids": True,
            "speculation": {"num_draft_tokens": 16, "trace": True},
        }
        answer = (await served.post(COMPLETIONS, body)).json()
        wasted = await served.metric("tandem_wasted_draft_tokens_total")
    choice = answer["choices"][0]
    assert choice["text"] == "bcd"
    assert choice["token_ids"] == [*b"bcdef"]
    assert [token["token_id"] for token in choice["trace"]] == [*b"bcdef"]
    assert answer["usage"]["completion_tokens"] == 5
    # Round 0: b. Round 1: sixteen drafted and accepted, of which c d e f are in the answer.
    assert answer["speculation"]["accepted"] == 16
    assert wasted == 12
    rounds = answer["speculation"]["round_trace"]
    assert [(each["prefill"], each["drafted"], each["accepted"]) for each in rounds] == [(True, 0, 0), (False, 16, 16)]
    for stage in ("draft_seconds", "verify_seconds", "network_seconds"):
        assert sum(each[stage] for each in rounds) == pytest.approx(answer["speculation"][stage])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
async def test_d12_stop_token_ids_cut_text_the_same_with_and_without_speculation(skip: bool, include: bool) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 20,
        "stop_token_ids": [START],
        "skip_special_tokens": skip,
        "include_stop_str_in_output": include,
        "return_token_ids": True,
    }
    async with gateway(tokens(*b"abcdef", START, *b"ghi")) as served:
        for enabled in (True, False):
            answer = (await served.post(COMPLETIONS, {**body, "speculation": {"enabled": enabled}})).json()
            assert answer["choices"][0]["text"] == "abcdef" + ("<|im_start|>" if include and not skip else "")
            assert answer["choices"][0]["token_ids"] == [*b"abcdef", START]
            assert answer["choices"][0]["finish_reason"] == "stop"


async def test_d6_nothing_follows_the_end_token() -> None:
    async with gateway(says("ab")) as served:
        answer = (await served.post(COMPLETIONS, {"prompt": "a", "return_token_ids": True})).json()
        ignoring = (await served.post(COMPLETIONS, {"prompt": "a", "ignore_eos": True, "max_tokens": 7})).json()
    assert answer["choices"][0]["token_ids"] == [*b"ab", END]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert ignoring["usage"]["completion_tokens"] == 7
    assert ignoring["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["héllo ✓ 世界 🙂 done", "🙂🙂🙂", "\U0001f468‍\U0001f469‍\U0001f467"])
async def test_a1_a4_text_of_many_bytes_streams_whole(text: str) -> None:
    async with gateway(says(text)) as served:
        body = {"prompt": "a", "max_tokens": 100}
        events = await served.events(COMPLETIONS, body)
        assert text_of(events) == text == (await served.post(COMPLETIONS, body)).json()["choices"][0]["text"]
        assert not any("\ufffd" in event["choices"][0]["text"] for event in events)


async def test_a2_invalid_bytes_do_not_stall_a_stream() -> None:
    async with gateway(tokens(0x61, 0xE4, 0xFF, 0x62, 0xF0, 0x9F)) as served:
        body = {"prompt": "a", "max_tokens": 6}
        events = await served.events(COMPLETIONS, body)
        assert text_of(events) == "a\ufffd\ufffdb\ufffd"
        assert (await served.post(COMPLETIONS, body)).json()["choices"][0]["text"] == text_of(events)


async def test_the_speculation_report_adds_up() -> None:
    fleet = FakeFleet.following(alphabet, wrong_at=lambda position: position % 3 == 2)
    fleet.drafts.num_bytes = 10
    async with gateway(fleet) as served:
        body = {"prompt": "a", "max_tokens": 8, "seed": 7, "speculation": {"num_draft_tokens": 3}}
        report = (await served.post(COMPLETIONS, body)).json()["speculation"]
        events = await served.events(COMPLETIONS, body)
        drafted = await served.metric("tandem_spec_decode_num_draft_tokens_total")
        accepted = await served.metric("tandem_spec_decode_num_accepted_tokens_total")
    # b | c D e | e f G | h i, as in test_speculate: drafted 3 + 3 + 1, accepted 1 + 2 + 1 of them.
    assert (report["rounds"], report["draftless_rounds"]) == (4, 1)
    assert (report["drafted"], report["accepted"]) == (7, 4)
    assert report["acceptance_rate"] == 4 / 7
    assert report["acceptance_length"] == 8 / 4
    assert report["accepted_per_position"] == [3, 1, 0]
    assert report["seed"] == 7
    assert report["bytes_sent"] == 70
    streamed = [event["speculation"] for event in events if "speculation" in event]
    assert [{**r, "network_seconds": 0} for r in streamed] == [{**report, "network_seconds": 0}]
    assert "speculation" in events[-1]
    assert (drafted, accepted) == (14, 8)  # K1: of both requests


async def test_a_seed_is_drawn_and_named_where_none_is_given() -> None:
    async with gateway(alphabet) as served:
        seeds = [(await served.post(COMPLETIONS, {"prompt": "a"})).json()["speculation"]["seed"] for _ in range(2)]
        assert seeds[0] != seeds[1]
        assert all(0 <= seed < 2**63 for seed in seeds)
        assert [start.seed for start in served.fleet.target.starts] == seeds
        await served.post(COMPLETIONS, {"prompt": "a", "seed": -1})
        assert served.fleet.target.starts[-1].seed == 2**64 - 1


async def test_prompt_ids_stand_where_vllm_has_them() -> None:
    async with gateway(alphabet) as served:
        body = {"max_tokens": 3, "return_token_ids": True}
        completion = {"prompt": "ab", **body}
        chat = {"messages": HELLO, **body}
        ids = [BOS, *b"ab"]
        assert (await served.post(COMPLETIONS, completion)).json()["choices"][0]["prompt_token_ids"] == ids
        events = await served.events(COMPLETIONS, completion)
        assert [event["choices"][0].get("prompt_token_ids") for event in events] == [ids, *[None] * (len(events) - 1)]
        document = (await served.post(CHAT, chat)).json()
        assert document["prompt_token_ids"][0] == BOS
        events = await served.events(CHAT, chat)
        assert [event.get("prompt_token_ids") for event in events] == [
            document["prompt_token_ids"],
            *[None] * (len(events) - 1),
        ]
