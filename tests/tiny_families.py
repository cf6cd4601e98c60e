"""Tiny random models of the families that TorchRunner serves, batches for them, and what the plain model says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tandem.engine.runner import RaggedBatch

VOCAB = 199
ROWS = 208  # the models' vocabulary is padded
BLOCK = 4
WINDOW = 12
COMMON: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that greedy text is not one token for ever
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # likewise
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=ROWS,
        n_positions=256,
        n_embd=32,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    ),
}


def from_config(config: PreTrainedConfig) -> Any:  # Any: transformers leaves its auto classes and `forward` untyped
    return AutoModelForCausalLM.from_config(config)


def make_model(family: str) -> Any:
    """The family's model, the same weights at every call."""
    torch.manual_seed(7)
    return from_config(FAMILIES[family]()).eval()


def prompt(length: int, *, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


@dataclass
class Chunk:
    """New tokens of one sequence: `tokens` follow `past` cached ones; logits of all of them or of the last only."""

    tokens: Sequence[int]
    past: int
    blocks: Sequence[int]
    rows: str = "all"  # all, last, none


def pack(chunks: Sequence[Chunk]) -> RaggedBatch:
    starts, block_starts = [0], [0]
    rows: list[int] = []
    for chunk in chunks:
        end = starts[-1] + len(chunk.tokens)
        rows.extend({"all": range(starts[-1], end), "last": [end - 1], "none": []}[chunk.rows])
        starts.append(end)
        block_starts.append(block_starts[-1] + len(chunk.blocks))

    def int32(values: Sequence[int]) -> Any:
        return np.array(values, dtype=np.int32)

    return RaggedBatch(
        token_ids=int32([token for chunk in chunks for token in chunk.tokens]),
        position_ids=int32([chunk.past + i for chunk in chunks for i in range(len(chunk.tokens))]),
        past_lens=int32([chunk.past for chunk in chunks]),
        sequence_starts=int32(starts),
        decode_starts=int32([0 for _ in chunks]),
        block_table=int32([block for chunk in chunks for block in chunk.blocks]),
        block_starts=int32(block_starts),
        logits_rows=int32(rows),
    )


def whole(family: str, tokens: Sequence[int]) -> torch.Tensor:
    """The reference: logits [len(tokens), vocab] of one forward of the plain model, without any cache."""
    with torch.inference_mode():
        logits = make_model(family)(input_ids=torch.tensor([tokens]), use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0, :, :VOCAB]


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
