"""The target service's settings, from TANDEM_TARGET_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import EngineSettings, OptionalFile, RpcServerSettings


class TargetSettings(RpcServerSettings, EngineSettings):
    """How the target service listens, and which model it serves."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_TARGET_")

    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int = Field(9101, ge=0, le=65535, description="Prometheus port; 0 takes a free one")
    attends_in_blocks: bool = Field(
        default=True,
        description="engine openvino: faster with few users, drafts and long contexts; slower for many plain streams",
    )
    draft_head: OptionalFile = Field(
        None,
        description="file of a draft head (`tandem distill`), which says what may follow by the model's hidden states",
    )
    model: str = Field("bundled", description="`bundled`, a Hugging Face folder, hub id or .gguf file")
