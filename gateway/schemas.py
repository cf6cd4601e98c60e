"""Request bodies of /v1/completions and /v1/chat/completions: OpenAI's fields, vLLM's extra ones, and `speculation`.

Four rules. `null` is the same as absent, everywhere. Types are strict: "5" is no number, 1.0 no integer. A known field
that cannot be honoured is refused by name (`_REFUSED`, `_NOT_BUILT`), never dropped. Any other field is ignored, as
clients send many that do no harm (user, metadata, store, service_tier and so on). Ranges are vLLM's, in
vllm/sampling_params.py; what depends on the model (vocabulary, context) is checked in gateway/generate.py.

Faults of one field are pydantic's ValidationError; faults between fields, and refused fields, are InvalidRequest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tandem.errors import InvalidRequest

_MAX_STOPS = 64
_MAX_STOP_CHARS = 1024
_MAX_LOGIT_BIAS = 1024
_MAX_MESSAGES = 4096

# Fields of OpenAI, vLLM and llama.cpp that would change the answer and cannot be honoured, each with the values that
# ask for nothing.
_REFUSED: Mapping[str, tuple[object, ...]] = {
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

# Fields that this version knows but does not serve yet, each with the value that asks for nothing.
_NOT_BUILT: Mapping[str, int] = {"n": 1, "best_of": 1, "echo": 0, "logprobs": 0, "top_logprobs": 0}


def _forms(description: str) -> WrapValidator:
    """For unions: one sentence in place of one complaint per alternative."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("forms", "must be {forms}", {"forms": description}) from error

    return WrapValidator(validate)


class _Body(BaseModel):
    """Strict, finite, and blind to null."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        if isinstance(value, dict):
            return {name: field for name, field in value.items() if field is not None}
        return value


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(_Body):
    """How to speculate for this request. It changes how fast the answer comes, not what it says."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    num_draft_tokens: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], _forms('a whole number from 1, or "auto"')
    ] = "auto"
    drafter: Annotated[str, Field(min_length=1, max_length=64)] = "auto"
    verification: Literal["auto", "rejection", "coupled"] = "auto"
    trace: bool = False

    @field_validator("verification")
    @classmethod
    def _check_verification(cls, value: str) -> str:
        if value == "coupled":
            raise ValueError('"coupled" is not available yet; use "rejection" or "auto"')
        return value


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


TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Stop = Annotated[str | list[str], Field(union_mode="left_to_right"), _forms("a string or a list of strings")]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    Field(union_mode="left_to_right"),
    _forms("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
Logprobs = Annotated[bool | Annotated[int, Field(ge=0, le=20)], _forms("true, false or a number from 0 to 20")]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]],
    Field(max_length=_MAX_LOGIT_BIAS),
    BeforeValidator(_ids_as_keys),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


class GenerationBody(_Body):
    """What both endpoints share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, description="the same as max_tokens")] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="-1 and 0 mean off")] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    logit_bias: LogitBias = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_STOPS)] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1)] = 1
    logprobs: Logprobs = False
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    return_token_ids: bool = False
    speculation: Speculation = Field(default_factory=Speculation)

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the request asks for; None where it does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: object) -> object:
        if isinstance(value, dict):
            for name, neutral in _REFUSED.items():
                asked = value.get(name)
                # The types must agree too: to Python, true equals 1.
                if asked is not None and not any(asked == v and type(asked) is type(v) for v in neutral):
                    raise InvalidRequest(f"{name} is not supported by this server", param=name)
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str]) -> str | list[str]:
        stops = [value] if isinstance(value, str) else value
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"at most {_MAX_STOPS} stop strings of at most {_MAX_STOP_CHARS} characters")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name, neutral in _NOT_BUILT.items():
            if getattr(self, name, neutral) > neutral:
                raise InvalidRequest(f"{name} is not supported by this server yet", param=name)
        if "stream_options" in self.model_fields_set and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.token_limit})", param="min_tokens"
            )
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    best_of: Annotated[int, Field(ge=1)] = 1
    echo: bool = False
    add_special_tokens: bool = True

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: str | list[str] | list[int] | list[list[int]]) -> object:
        if not value or any(part in ("", []) for part in value):
            raise ValueError("a prompt must not be empty")
        return value

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt, in order: all texts, or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # the list forms were told apart in validation
        return self.prompt


class Message(_Body):
    """One turn of a chat. Other keys (name, tool_calls and so on) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        str | list[dict[str, Any]], Field(union_mode="left_to_right"), _forms("a string or a list of text parts")
    ] = ""

    @field_validator("content")
    @classmethod
    def _join_parts(cls, value: str | list[dict[str, Any]]) -> str:
        """Text parts joined by line ends, as vLLM does."""
        if isinstance(value, str):
            return value
        texts: list[str] = []
        for part in value:
            text = part.get("text")
            if part.get("type") != "text" or not isinstance(text, str):
                raise ValueError('only parts of the form {"type": "text", "text": "..."} are supported')
            texts.append(text)
        return "\n".join(texts)

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if "content" not in self.model_fields_set and not (self.model_extra or {}).get("tool_calls"):
            raise ValueError("a message needs a content")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the request hands to the chat template besides the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs
