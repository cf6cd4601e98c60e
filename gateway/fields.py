"""What request bodies are made of: the strict base, the types of single fields, and the fields that are refused.

Everything here also says in the OpenAPI document what it takes, so that a client, or a fuzzer, can be written from
that document alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
_MAX_LOGIT_BIAS = 1024

# Fields of OpenAI, vLLM and llama.cpp that would change the answer and cannot be honoured, each with the values that
# ask for nothing.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mirostat": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def forms(description: str) -> WrapValidator:
    """For unions: one sentence in place of one complaint per alternative."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("forms", "must be {forms}", {"forms": description}) from error

    return WrapValidator(validate)


class Body(BaseModel):
    """Strict, finite, and blind to null."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        if isinstance(value, dict):
            return {name: field for name, field in value.items() if field is not None}
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """As pydantic makes it, with null allowed wherever a field may be absent."""
        document = handler.resolve_ref_schema(handler(schema))
        required = document.get("required", [])
        for name, field in document.get("properties", {}).items():
            alternatives = field.get("anyOf", ())
            if name not in required and {"type": "null"} not in alternatives:
                notes = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
                document["properties"][name] = {"anyOf": [field, {"type": "null"}], **notes}
        return document


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Body):
    """How to speculate for this request. It changes how fast the answer comes, not what it says."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    num_draft_tokens: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], forms('a whole number from 1, or "auto"')
    ] = "auto"
    drafter: Annotated[str, Field(min_length=1, max_length=64)] = "auto"
    verification: Annotated[
        Literal["auto", "rejection", "coupled"],
        Field(description="auto: coupled where the request gives a seed, else rejection"),
    ] = "auto"
    trace: bool = False


def _ids_as_keys(value: object) -> object:
    """JSON has no integer keys: {"50256": -100}."""
    if not isinstance(value, dict):
        return value
    biases: dict[int, object] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError("keys must be token ids, that is, whole numbers from 0")
        biases[int(key)] = bias
    return biases


def _false_is_absent(value: object) -> object:
    """`logprobs: false` on /v1/completions asks for nothing, as null does; true would not say how many."""
    return None if value is False else value


TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stop = Annotated[
    str | list[str],
    Field(union_mode="left_to_right"),
    forms("a string or a list of strings"),
    WithJsonSchema({"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOPS}]}),
]
_ID_LIST_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    Field(union_mode="left_to_right"),
    forms("a string, a list of strings, a list of token ids or a list of lists of token ids"),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1},
                _ID_LIST_SCHEMA,
                {"type": "array", "items": _ID_LIST_SCHEMA, "minItems": 1},
            ]
        }
    ),
]
CompletionLogprobs = Annotated[
    Annotated[int, Field(ge=0, le=5)] | None,
    BeforeValidator(_false_is_absent),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"const": False}]}),
]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]],
    Field(max_length=_MAX_LOGIT_BIAS),
    BeforeValidator(_ids_as_keys),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": _MAX_LOGIT_BIAS,
        }
    ),
]


def check_refused(value: object, refused: Mapping[str, tuple[object, ...]]) -> str | None:
    """The first field of a body that asks for what is refused."""
    if isinstance(value, dict):
        for name, neutral in refused.items():
            asked = value.get(name)
            # The types must agree too: to Python, true equals 1.
            if asked is not None and not any(asked == v and type(asked) is type(v) for v in neutral):
                return name
    return None


def refused_schema(refused: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
    """The refused fields, as the OpenAPI document has them: only what asks for nothing is taken."""
    return {
        name: {"enum": [*neutral, None], "description": "not supported: any other value is a 400"}
        for name, neutral in refused.items()
    }
