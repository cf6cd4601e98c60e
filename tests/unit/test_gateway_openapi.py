"""/openapi.json is true: of what is taken, of what is answered, of what goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openapi import (
    ChatDocument,
    CompletionDocument,
    ErrorDocument,
    ModelCard,
    ModelList,
    ReadinessDocument,
)
from gateway.schemas import ChatBody, CompletionBody
from tests.fakes import alphabet
from tests.gateways import CHAT, COMPLETIONS, HELLO, gateway

pytestmark = pytest.mark.usefixtures("quiet_logs")


async def openapi() -> dict[str, Any]:
    async with gateway(alphabet) as served:
        document: dict[str, Any] = (await served.http.get("/openapi.json")).json()
    return document


async def test_i7_the_document_names_every_error_that_occurs_and_no_other() -> None:
    paths = (await openapi())["paths"]
    generation = {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503", "504"}
    assert set(paths[COMPLETIONS]["post"]["responses"]) == set(paths[CHAT]["post"]["responses"]) == generation
    assert set(paths["/v1/models"]["get"]["responses"]) == {"200", "401", "500", "503"}
    assert set(paths["/v1/models/{model_id}"]["get"]["responses"]) == {"200", "401", "404", "500", "503"}
    assert set(paths["/health/ready"]["get"]["responses"]) == {"200", "500", "503"}
    assert set(paths["/metrics"]["get"]["responses"]) == {"200", "401", "500"}
    assert "Retry-After" in paths[CHAT]["post"]["responses"]["429"]["headers"]
    assert "text/event-stream" in paths[CHAT]["post"]["responses"]["200"]["content"]
    assert "HTTPValidationError" not in (await openapi())["components"]["schemas"]


async def test_i7_every_field_has_its_range_and_may_be_null() -> None:
    schemas = (await openapi())["components"]["schemas"]
    for name, body in (("CompletionBody", CompletionBody), ("ChatBody", ChatBody)):
        schema = schemas[name]
        assert set(body.model_fields) <= set(schema["properties"])
        for field, property_ in schema["properties"].items():
            taken = property_.get("anyOf", []), property_.get("enum", [])
            assert (field in schema["required"]) is not ({"type": "null"} in taken[0] or None in taken[1]), field
        for field, least, most in (
            ("temperature", 0, 2),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("repetition_penalty", 0.01, 100),
            ("n", 1, 128),
        ):
            number = schema["properties"][field]["anyOf"][0]
            assert (number["minimum"], number["maximum"]) == (least, most)
        assert schema["properties"]["tools"]["enum"] == [[], None]
    assert schemas["CompletionBody"]["properties"]["logprobs"]["anyOf"][0]["anyOf"][0]["maximum"] == 5
    assert schemas["ChatBody"]["properties"]["top_logprobs"]["anyOf"][0]["maximum"] == 20
    assert schemas["CompletionBody"]["required"] == ["prompt"]
    assert schemas["Speculation"]["additionalProperties"] is False


async def test_answers_are_what_the_document_says() -> None:
    extras = {"max_tokens": 3, "return_token_ids": True, "speculation": {"trace": True}, "n": 2}
    async with gateway(alphabet) as served:
        for fields in ({}, extras, {**extras, "logprobs": 2, "echo": True}):
            answer = await served.post(COMPLETIONS, {"prompt": "a", **fields})
            CompletionDocument.model_validate_json(answer.content)
        for chat in ({}, {**extras, "logprobs": True, "top_logprobs": 2}):
            answer = await served.post(CHAT, {"messages": HELLO, "max_tokens": 3, **chat})
            ChatDocument.model_validate_json(answer.content)
        ModelList.model_validate_json((await served.http.get("/v1/models")).content)
        ModelCard.model_validate_json((await served.http.get("/v1/models/tandem")).content)
        ReadinessDocument.model_validate_json((await served.http.get("/health/ready")).content)
        for response in (await served.post(CHAT, {}), await served.post(CHAT, []), await served.http.get("/nope")):
            ErrorDocument.model_validate_json(response.content)
