"""Every error of ours has a status and OpenAI's body, and says nothing of our insides."""

from __future__ import annotations

import pytest

from gateway.errors import error_body, error_response, field_name, shape_of, unmapped
from tandem.errors import (
    ContextTooLong,
    InternalError,
    InvalidRequest,
    Mismatch,
    OutOfStep,
    Overloaded,
    TandemError,
    TimedOut,
    Unavailable,
    UnknownModel,
)


def test_no_class_of_the_tree_is_unmapped() -> None:
    assert unmapped() == set()


def test_a_class_that_is_added_to_a_tree_is_noticed() -> None:
    class Root(TandemError):
        pass

    class Leaf(Root):
        pass

    assert unmapped(Root) == {Leaf}
    assert shape_of(Leaf("x")).status == 500


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidRequest("m", param="stop"), 400, None, "stop"),
        (ContextTooLong("m", param="prompt"), 400, "context_length_exceeded", "prompt"),
        (UnknownModel("m"), 404, "model_not_found", "model"),
        (Overloaded("m"), 429, "overloaded", None),
        (Mismatch("m"), 503, "mismatch", None),
        (Unavailable("m"), 503, "unavailable", None),
        (TimedOut("m"), 504, "timeout", None),
    ],
)
def test_i6_errors_have_their_status_and_openais_body(
    error: TandemError, status: int, code: str | None, param: str | None
) -> None:
    assert error_response(error).status_code == status
    body = error_body(error)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert (body["message"], body["code"], body["param"]) == ("m", code, param)


@pytest.mark.parametrize("error", [InternalError("secret"), OutOfStep("secret"), ValueError("secret"), KeyError("x")])
def test_faults_of_our_own_show_nothing_but_the_request_id(error: Exception) -> None:
    assert error_response(error).status_code == 500
    message = error_body(error, request_id="r1")["error"]["message"]
    assert "secret" not in message
    assert "r1" in message


def test_only_errors_worth_trying_again_say_so() -> None:
    assert error_response(Overloaded("m")).headers["retry-after"] == "1"
    assert error_response(Unavailable("m")).headers["retry-after"] == "1"
    assert "retry-after" not in error_response(InvalidRequest("m")).headers


def test_fields_are_named_as_openai_names_them() -> None:
    assert field_name(("body", "messages", 0, "role")) == "messages[0].role"
    assert field_name(("body",)) == ""
    assert field_name(("body", "body")) == "body"
