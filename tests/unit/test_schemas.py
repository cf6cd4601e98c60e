"""Which bodies are taken, which are refused, and whether the refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.errors import invalid_request
from gateway.schemas import ChatBody, CompletionBody, GenerationBody
from tandem.errors import InvalidRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NULLABLE = sorted({*CompletionBody.model_fields, *ChatBody.model_fields} - {"prompt", "messages"})


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "a", **fields})


def refusal(body: type[GenerationBody], content: object) -> InvalidRequest:
    """The error that a client would see."""
    try:
        body.model_validate(content)
    except ValidationError as error:
        return invalid_request(error.errors())
    except InvalidRequest as error:
        return error
    raise AssertionError(f"{content} was taken")


@pytest.mark.parametrize("field", NULLABLE)
def test_e1_null_is_the_same_as_absent(field: str) -> None:
    assert completion(**{field: None}) == completion()
    assert ChatBody.model_validate({**CHAT, field: None}) == ChatBody.model_validate(CHAT)


def test_null_is_the_same_as_absent_inside_objects_too() -> None:
    assert completion(speculation={"enabled": None, "trace": None}).speculation.enabled is True
    assert completion(stream=True, stream_options={"include_usage": None}).stream_options.include_usage is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 2),
        ("min_p", -0.1),
        ("temperature", 5),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("presence_penalty", 100),
        ("frequency_penalty", -100),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 0.5),
        ("max_tokens", 1e12),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("stream", 1),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 1e300),
        ("n", 0),
        ("n", 129),
        ("n", 100_000),
        ("logprobs", 6),
        ("logprobs", 1_000_000),
        ("logprobs", -1),
        ("logprobs", True),
        ("echo", 1),
        ("best_of", 0),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("model", 5),
    ],
)
def test_f14_e14_d10_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    error = refusal(CompletionBody, {"prompt": "a", field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 1),
        ("top_p", 1e-300),
        ("top_k", -1),
        ("top_k", 0),
        ("min_p", 1),
        ("temperature", 0),
        ("temperature", 2),
        ("temperature", 1e-8),
        ("presence_penalty", -2),
        ("repetition_penalty", 1.3),
        ("seed", -(2**63)),
        ("n", 128),
        ("best_of", 1),
        ("logprobs", 0),
        ("logprobs", 5),
        ("logprobs", False),
        ("echo", False),
        ("echo", True),
        ("top_logprobs", 0),
        ("stop", []),
        ("stop", "a"),
        ("tools", []),
        ("suffix", ""),
        ("response_format", {"type": "text"}),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"),
        ("priority", 3),
    ],
)
def test_f14_values_at_the_edges_and_harmless_fields_are_taken(field: str, value: object) -> None:
    completion(**{field: value})


@pytest.mark.parametrize("bias", [{"-1": 5}, {"abc": 1}, {"5": 101}, {"5": "1"}, {"1.5": 1}, {"": 1}, [1], "x"])
def test_f12_a_logit_bias_that_names_no_token_is_refused(bias: object) -> None:
    assert (refusal(CompletionBody, {"prompt": "a", "logit_bias": bias}).param or "").startswith("logit_bias")


def test_f13_an_empty_logit_bias_is_taken() -> None:
    assert completion(logit_bias={}).logit_bias == {}
    assert completion(logit_bias={"7": -100}).logit_bias == {7: -100.0}


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
def test_e3_an_empty_prompt_is_refused(prompt: object) -> None:
    error = refusal(CompletionBody, {"prompt": prompt})
    assert error.param == "prompt"
    assert "empty" in error.message


@pytest.mark.parametrize("prompt", [5, {}, [1, "a"], [True], [1.5], [["a"]], [[1], "a"], True])
def test_a_prompt_of_no_known_form_is_refused_in_one_sentence(prompt: object) -> None:
    error = refusal(CompletionBody, {"prompt": prompt})
    assert error.message.startswith("prompt: must be a string, a list of strings, a list of token ids")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_of_all_four_forms_are_taken(prompt: object, expected: object) -> None:
    assert CompletionBody.model_validate({"prompt": prompt}).prompts == expected


def test_e5_max_completion_tokens_is_max_tokens_on_both_endpoints() -> None:
    assert completion(max_completion_tokens=7).token_limit == 7
    assert completion(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert ChatBody.model_validate({**CHAT, "max_completion_tokens": 7}).token_limit == 7
    assert completion().token_limit is None


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
def test_c3_stream_options_without_stream_are_refused(options: Mapping[str, bool]) -> None:
    assert refusal(CompletionBody, {"prompt": "a", "stream_options": options}).param == "stream_options"
    completion(stream=True, stream_options=options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", 5),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("suffix", "x"),
        ("best_of", 2),
        ("top_logprobs", 1),
        ("prompt_logprobs", 0),
        ("truncate_prompt_tokens", 5),
        ("guided_json", {}),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("length_penalty", True),
    ],
)
def test_i4_known_fields_that_cannot_be_honoured_are_refused_by_name(field: str, value: object) -> None:
    error = refusal(CompletionBody, {"prompt": "a", field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_g8_i4_chats_refuse_by_name_too(fields: Mapping[str, object], param: str) -> None:
    assert refusal(ChatBody, {**CHAT, **fields}).param == param


def test_log_probabilities_are_off_unless_asked_for() -> None:
    assert completion().num_logprobs is None
    assert completion(logprobs=False).num_logprobs is None
    assert completion(logprobs=0).num_logprobs == 0
    assert ChatBody.model_validate({**CHAT, "top_logprobs": 0}).num_logprobs is None
    assert ChatBody.model_validate({**CHAT, "logprobs": True}).num_logprobs == 0
    assert ChatBody.model_validate({**CHAT, "logprobs": True, "top_logprobs": 20}).num_logprobs == 20


def test_e14_no_tokens_at_all_only_with_echo() -> None:
    assert refusal(CompletionBody, {"prompt": "a", "max_tokens": 0}).param == "max_tokens"
    assert refusal(CompletionBody, {"prompt": "a", "max_completion_tokens": 0}).param == "max_completion_tokens"
    assert completion(max_tokens=0, echo=True).token_limit == 0


def test_best_of_is_taken_where_it_asks_for_nothing() -> None:
    assert refusal(CompletionBody, {"prompt": "a", "n": 2, "best_of": 3}).param == "best_of"
    assert refusal(CompletionBody, {"prompt": "a", "n": 2, "best_of": 1}).param == "best_of"
    completion(n=2, best_of=2)


@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        ({"unknown": 1}, "speculation.unknown"),
        ({"num_draft_tokens": 0}, "speculation.num_draft_tokens"),
        ({"num_draft_tokens": "many"}, "speculation.num_draft_tokens"),
        ({"num_draft_tokens": True}, "speculation.num_draft_tokens"),
        ({"verification": "typical"}, "speculation.verification"),
        ({"enabled": "yes"}, "speculation.enabled"),
        ({"drafter": ""}, "speculation.drafter"),
        (5, "speculation"),
    ],
)
def test_speculation_is_checked_to_the_last_field(speculation: object, param: str) -> None:
    assert refusal(CompletionBody, {"prompt": "a", "speculation": speculation}).param == param


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert refusal(CompletionBody, {"prompt": "a", "max_tokens": 3, "min_tokens": 4}).param == "min_tokens"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": 5, "content": "b"}], "messages[1].role"),
    ],
)
def test_messages_are_checked_to_the_last_field(messages: object, param: str) -> None:
    assert refusal(ChatBody, {"messages": messages}).param == param


def test_text_parts_are_joined_and_other_keys_kept_for_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": parts, "name": "x"}]})
    assert body.messages[0].model_dump() == {"role": "user", "content": "a\nb", "name": "x"}


@pytest.mark.parametrize("content", [[], None, 123, "s", True])
def test_i2_a_body_that_is_no_object_is_refused(content: object) -> None:
    assert refusal(CompletionBody, content).message == "the request body must be a JSON object"
