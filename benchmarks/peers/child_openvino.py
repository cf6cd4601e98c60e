"""OpenVINO GenAI's LLMPipeline, plain or with its prompt lookup: on the GGUF file itself, or on the model that Tandem
serves."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.child_protocol import Clock, serve

_MAX_BATCHED_TOKENS = 8192  # a prompt is read in one step, as the pipeline's own setting for one user does


class _Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # it has no types
    """Passes the number of tokens of each step on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def write(self, token: int | Sequence[int]) -> Any:
        self._clock.tokens(len(token) if isinstance(token, Sequence) else 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class OpenVino:
    """Settings: `threads`; `weights`, "gguf" (the default) or "folder"; `backend`, PA (paged attention, the default) or
    SDPA; `lookup`, for generate: with it, drafts come from the prompt and the text so far."""

    def start(self, setting: dict[str, Any]) -> dict[str, Any]:
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setting["threads"]}
        if setting.get("backend") == "SDPA":
            properties["ATTENTION_BACKEND"] = "SDPA"
        else:
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.max_num_batched_tokens = _MAX_BATCHED_TOKENS
            properties["scheduler_config"] = scheduler
        lookup: dict[str, Any] | None = setting.get("lookup")
        if lookup:
            properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.LLMPipeline(setting[setting.get("weights", "gguf")], "CPU", **properties)
        self._config = openvino_genai.GenerationConfig()
        self._config.do_sample = False
        self._config.apply_chat_template = False
        self._config.eos_token_id = setting["end_token_ids"][0]
        self._config.stop_token_ids = set(setting["end_token_ids"])
        for name, value in (lookup or {}).items():
            setattr(self._config, name, value)
        return {"versions": {name: version(name) for name in ("openvino-genai", "openvino")}}

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        self._config.max_new_tokens = max_tokens
        token_ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        clock = Clock()
        result = self._pipeline.generate(token_ids, self._config, _Streamer(clock))
        return clock.result(list(result.tokens[0]))


if __name__ == "__main__":
    serve(OpenVino())
