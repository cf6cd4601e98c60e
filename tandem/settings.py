"""Settings that every process shares. Each service adds its own; only `__main__` modules read the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, FilePath, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

# An existing file; empty, as a variable that is set to nothing, means none.
OptionalFile = Annotated[FilePath | None, BeforeValidator(lambda given: None if given == "" else given)]


def check_together(first: tuple[str, Path | None], second: tuple[str, Path | None]) -> None:
    """Raises ValueError where one of the two is given without the other; each is a setting's name and its value."""
    for (missing, value), (given, other) in ((first, second), (second, first)):
        if value is None and other is not None:
            raise ValueError(f"{given} needs {missing} too")


class LogSettings(BaseSettings):
    """How this process logs."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_LOG_")

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["text", "json"] = "text"


class TracingSettings(BaseSettings):
    """Whether and where this process sends traces."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_TRACING_", frozen=True)

    endpoint: str | None = Field(
        None, description="address of an OTLP receiver, over HTTP, as http://collector:4318; empty: no traces"
    )
    sample_ratio: float = Field(
        1.0, ge=0.0, le=1.0, description="share of requests that are traced, where who asks has not decided already"
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if not endpoint:
            return None
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
            raise ValueError("it must begin with http:// or https:// and name a host")
        return endpoint

    @property
    def traces_url(self) -> str:
        """Where spans are posted: OTLP's own path, unless the address has one."""
        assert self.endpoint is not None
        return self.endpoint if urlsplit(self.endpoint).path.strip("/") else f"{self.endpoint.rstrip('/')}/v1/traces"


class RpcServerSettings(BaseSettings):
    """How a model service listens. Its own prefix comes with the subclass."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0 takes a free one")
    max_sessions: int = Field(64, ge=1, le=4096, description="open streams at once; more is RESOURCE_EXHAUSTED")
    shutdown_grace_seconds: float = Field(30.0, ge=0.0, description="how long open streams may go on after SIGTERM")
    tls_certificate_file: OptionalFile = Field(None, description="PEM; with tls_key_file: gRPC over TLS")
    tls_key_file: OptionalFile = Field(None, description="PEM, not encrypted")
    tls_client_ca_file: OptionalFile = Field(
        None, description="PEM; with it, callers must show a certificate that this authority signed (mutual TLS)"
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        check_together(("tls_certificate_file", self.tls_certificate_file), ("tls_key_file", self.tls_key_file))
        if self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            raise ValueError("tls_client_ca_file needs tls_certificate_file and tls_key_file too")
        return self


class EngineSettings(BaseSettings):
    """How a model is loaded and batched."""

    engine: Literal["auto", "torch", "openvino"] = Field(
        "auto", description="auto: openvino on a CPU where the model comes as GGUF or OpenVINO, else torch"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and KV cache")
    threads: int = Field(1, ge=1, description="CPU threads; two model processes must not share cores")
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 20, description="memory of the KV cache")
    block_size: int | None = Field(None, ge=1, le=64, description="tokens per KV block; empty: what suits the engine")
    stall_timeout_seconds: float = Field(
        30.0, gt=0.0, description="a model that finishes no step for so long is not ready until it does"
    )
    max_step_tokens: int = Field(256, ge=128, description="tokens per forward: the longest stall by others' prefill")
    fixed_step_bytes: int = Field(
        5 << 28,
        ge=0,
        description="engine openvino: memory for copies of the model, compiled for steps of one size each, which take "
        "15 % less time; 0: none",
    )
    attends_in_blocks: bool = Field(
        default=False, description="engine openvino: faster for verifying drafts, slower without them"
    )
    cuda_graphs: bool = Field(default=True, description="engine torch on a GPU: record decode steps, then replay them")
