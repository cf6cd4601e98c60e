"""The draft service's settings, from TANDEM_DRAFT_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import EngineSettings, RpcServerSettings


class DraftSettings(RpcServerSettings, EngineSettings):
    """How the draft service listens, and what it drafts with."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFT_")

    port: int = Field(50052, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int = Field(9102, ge=0, le=65535, description="Prometheus port; 0 takes a free one")
    model: str = Field("", description="`bundled`, a Hugging Face folder, hub id or .gguf file; empty: n-grams only")
    table: str = Field(
        "none",
        description="n-grams of the target's own answers: a file that `tandem distill` wrote, `bundled`, `none`, or "
        "`auto`: the bundled one where target_model is `bundled`",
    )
    target_model: str = Field("", description="what the target service serves, for table `auto`")
    least_certainty: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="how likely to stand a looked-up guess must be, with those before it; the gateway may say",
    )
    num_layers: int | None = Field(None, ge=1, description="keep only the model's first layers")
    max_draft_tokens: int = Field(16, ge=1, le=64, description="most tokens drafted in a round")
    law_size: int = Field(50, ge=1, le=8192, description="tokens in the law that a sampled draft is drawn from")
    prepared_branches: int = Field(
        6,
        ge=0,
        le=64,
        description="outcomes of a verification for which the model prepares the next draft meanwhile; 0: none, for a "
        "draft that shares its device with the target",
    )
    min_ngram: int = Field(1, ge=1, le=64, description="shortest repeated suffix that n-grams continue")
    auto_match: int = Field(
        4, ge=1, le=64, description="shortest repeated suffix that `auto` continues where a model would draft else"
    )
