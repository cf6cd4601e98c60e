"""Request bodies of /v1/completions and /v1/chat/completions: OpenAI's fields, vLLM's extra ones, and `speculation`.

Four rules. `null` is the same as absent, everywhere. Types are strict: "5" is no number, 1.0 no integer. A known field
that cannot be honoured is refused by name (`REFUSED` in gateway/fields.py), never dropped. Any other field is ignored,
as clients send many that do no harm (user, metadata, store, service_tier and so on). Ranges are vLLM's, in
vllm/sampling_params.py; what depends on the model (vocabulary, context) is checked in gateway/jobs.py.

Faults of one field are pydantic's ValidationError; faults between fields, and refused fields, are InvalidRequest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema

from gateway.fields import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    REFUSED,
    Body,
    CompletionLogprobs,
    LogitBias,
    Prompt,
    Speculation,
    Stop,
    StreamOptions,
    TokenId,
    check_refused,
    forms,
    refused_schema,
)
from tandem.errors import InvalidRequest

_MAX_MESSAGES = 4096


class GenerationBody(Body):
    """What both endpoints share."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, description="the same as max_tokens")] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="-1 and 0 mean off")] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    # vLLM takes any positive number; beyond these, float32 logits overflow.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, default_factory=list)]
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=128, description="answers to each prompt; the server's own limit is lower")] = 1
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

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many alternatives to report at every token; None: no log-probabilities at all."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: object) -> object:
        name = check_refused(value, cls.refused)
        if name is not None:
            raise InvalidRequest(f"{name} is not supported by this server", param=name)
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str]) -> str | list[str]:
        stops = [value] if isinstance(value, str) else value
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"at most {MAX_STOPS} stop strings of at most {MAX_STOP_CHARS} characters")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.token_limit})", param="min_tokens"
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        document = super().__get_pydantic_json_schema__(schema, handler)
        document["properties"] |= refused_schema(cls.refused)
        return document


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {**REFUSED, "top_logprobs": (0,)}

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, description="0 only with echo: score the prompt")] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, description="the same as max_tokens")] | None = None
    logprobs: CompletionLogprobs = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, description="must equal n")] | None = None
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: str | list[str] | list[int] | list[list[int]]) -> object:
        if not value or any(part in ("", []) for part in value):
            raise ValueError("a prompt must not be empty")
        return value

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.token_limit == 0 and not self.echo:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequest(f"{name} must be at least 1 unless echo is true", param=name)
        if self.best_of not in (None, self.n):
            raise InvalidRequest(
                f"best_of is not supported: all n answers are returned, so it must be absent or equal n ({self.n})",
                param="best_of",
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt, in order: all texts, or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # the list forms were told apart in validation
        return self.prompt


class Message(Body, extra="allow"):
    """One turn of a chat. Other keys (name, tool_calls and so on) go to the chat template as they are."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        str | list[dict[str, Any]], Field(union_mode="left_to_right"), forms("a string or a list of text parts")
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

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {**REFUSED, "best_of": (1,), "echo": (False,)}

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20, description="above 0 only with logprobs")] = 0
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the request hands to the chat template besides the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs
