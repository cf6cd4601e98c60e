"""The gateway's settings: read once from the environment (prefix `TANDEM_GATEWAY_`), checked, then frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from tandem.settings import OptionalFile, check_together

Addresses = Annotated[tuple[str, ...], NoDecode]


class Settings(BaseSettings):
    """Every field is an environment variable: `port` is `TANDEM_GATEWAY_PORT`, and so on."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_GATEWAY_", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on; a container needs 0.0.0.0")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")

    target_addresses: Addresses = Field(
        ("127.0.0.1:50051",), description="host:port of each target service, comma between; at least one"
    )
    draft_addresses: Addresses = Field(
        ("127.0.0.1:50052",), description="host:port of each draft service, comma between; empty: see lookup"
    )
    lookup: bool = Field(
        default=True, description="with no draft service: draft by looking up how texts may go on; else plain decoding"
    )
    table: str = Field(
        "auto",
        description="n-grams of the target's own answers to look up in: a file that `tandem distill` wrote, `bundled`, "
        "`none`, or `auto`: the bundled one where the target is the model it was made for",
    )

    api_keys_file: OptionalFile = Field(
        None, description="a key a line (gateway/access.py); with it, only who has one is answered"
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="serves /metrics there too, without key and TLS, for Prometheus alone"
    )
    tls_certificate_file: OptionalFile = Field(None, description="PEM, the chain included; with tls_key_file: HTTPS")
    tls_key_file: OptionalFile = Field(None, description="PEM, not encrypted")
    rpc_ca_file: OptionalFile = Field(
        None, description="PEM; the services are spoken to over TLS, and must show a certificate it signed"
    )
    rpc_certificate_file: OptionalFile = Field(None, description="PEM; what the gateway shows to the services")
    rpc_key_file: OptionalFile = Field(None, description="PEM, not encrypted")

    probe_interval_seconds: float = Field(2.0, gt=0.0, description="between two questions whether a service is alive")
    probe_timeout_seconds: float = Field(2.0, gt=0.0, description="for a service to answer that it is alive")
    first_token_timeout_seconds: float = Field(120.0, gt=0.0, description="for the target's prefill and first token")
    verify_timeout_seconds: float = Field(30.0, gt=0.0, description="for one round at the target")
    failover_timeout_seconds: float = Field(
        15.0, ge=0.0, description="how long a request does without any target, until one is back; then 503"
    )
    draft_first_timeout_seconds: float = Field(10.0, gt=0.0, description="for the draft's prefill and first draft")
    draft_timeout_seconds: float = Field(1.0, gt=0.0, description="for a draft; the round then goes on without one")
    draft_retry_seconds: float = Field(3.0, gt=0.0, description="longest time between two tries of a faulty draft")

    num_draft_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description='draft tokens per round where a request says nothing or "auto"; auto: as many as pay'
    )
    max_num_draft_tokens: int = Field(16, ge=1, le=64, description="the most draft tokens a request may ask for")

    record_prompts: Path | None = Field(
        None, description="file for a sample of prompts, for `tandem advise`; empty: none is ever stored"
    )
    record_max_prompts: int = Field(1000, ge=1, le=10_000, description="the most prompts in that file")

    max_header_bytes: int = Field(64 << 10, ge=1024, description="larger request headers are refused (431)")
    max_body_bytes: int = Field(4 << 20, ge=1, description="a larger request body is refused (413) before it is parsed")
    max_prompt_chars: int = Field(
        1_000_000, ge=1, description="longest prompt in characters, checked before tokenising, whose time it bounds"
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="longest prompt, where the context is not the limit")
    max_n: int = Field(8, ge=1, description="answers to one request: prompts times n")

    max_concurrent_requests: int = Field(
        32, ge=1, description="answers generated at once; a request with several prompts counts once per prompt"
    )
    assumed_answer_tokens: int = Field(
        512,
        ge=1,
        description="the target's KV memory is kept for so long an answer where a request names no max_tokens",
    )
    max_queued_requests: int = Field(128, ge=0, description="requests that may wait for their turn; the next gets 429")

    max_connections: int = Field(512, ge=1, description="open connections; one more is told to come back (503)")

    request_timeout_seconds: float = Field(
        600.0, gt=0.0, description="from arrival to the last token, waiting included"
    )
    header_timeout_seconds: float = Field(15.0, gt=0.0, description="for all headers of a request to arrive")
    body_timeout_seconds: float = Field(30.0, gt=0.0, description="for the whole request body to arrive")
    ping_interval_seconds: float = Field(15.0, gt=0.0, description="silence after which a stream gets a comment line")
    write_timeout_seconds: float = Field(60.0, gt=0.0, description="how long a client may leave a stream unread")
    shutdown_grace_seconds: float = Field(30.0, ge=0.0, description="how long answers may go on after SIGTERM")

    @field_validator("target_addresses", "draft_addresses", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("record_prompts", mode="before")
    @classmethod
    def _none_of_empty(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("target_addresses", "draft_addresses")
    @classmethod
    def _check_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
                raise ValueError(f"{address!r} is not host:port")
        return addresses

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.target_addresses:
            raise ValueError("target_addresses must name at least one target service")
        check_together(("tls_certificate_file", self.tls_certificate_file), ("tls_key_file", self.tls_key_file))
        check_together(("rpc_certificate_file", self.rpc_certificate_file), ("rpc_key_file", self.rpc_key_file))
        if self.rpc_certificate_file is not None and self.rpc_ca_file is None:
            raise ValueError("rpc_certificate_file needs rpc_ca_file too")
        if self.num_draft_tokens != "auto" and self.num_draft_tokens > self.max_num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens ({self.num_draft_tokens}) must not exceed "
                f"max_num_draft_tokens ({self.max_num_draft_tokens})"
            )
        if self.max_n > self.max_concurrent_requests:
            # All answers to one request start together: one that needs more places than there are would never start.
            raise ValueError(
                f"max_n ({self.max_n}) must not exceed max_concurrent_requests ({self.max_concurrent_requests})"
            )
        return self
