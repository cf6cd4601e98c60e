"""transformers' own `generate`, in bfloat16: plain, prompt lookup, or with its own first layers as the assistant."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.child_protocol import Clock, serve


class _Streamer(BaseStreamer):
    """Passes the number of tokens of each step on. The first thing that comes is the prompt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._clock.tokens(value.numel())
        self._prompt_seen = True

    def end(self) -> None:
        pass


class Transformers:
    """Settings: `threads`; `generate`, more of generate's arguments."""

    def start(self, setting: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(setting["threads"])
        transformers.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(setting["folder"], dtype=torch.bfloat16).eval()
        self._end_token_ids: list[int] = setting["end_token_ids"]
        self._arguments: dict[str, Any] = setting.get("generate", {})
        return {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        clock = Clock()
        token_ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self._end_token_ids,
                pad_token_id=self._end_token_ids[0],
                streamer=_Streamer(clock),
                **self._arguments,
            )
        return clock.result(output[0, len(prompt) :].tolist())


if __name__ == "__main__":
    serve(Transformers())
