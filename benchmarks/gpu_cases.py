"""What `gpu_check` measures: the model, and batches for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers

from tandem.engine.runner import ModelRunner, RaggedBatch
from tandem.models.bundled import default_cache_dir
from tandem.models.loading import load_model
from tandem.models.locate import locate

BLOCK_SIZE = 32  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. Lengths in tokens."""

    model: dict[str, Any]  # as LlamaConfig takes it
    prefills: tuple[int, ...]
    contexts: tuple[int, ...]
    verify_blocks: tuple[int, ...]
    batches: tuple[int, ...]
    repeats: int
    rounds: int  # of the rejection rule
    copy_bytes: int


FULL = Plan(
    model={  # as Llama 3.2 1B: 1.24 billion parameters
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    prefills=(512, 2048),
    contexts=(256, 2048),
    verify_blocks=tuple(range(1, 18)),
    batches=(1, 2, 4, 8, 16, 32, 64),
    repeats=15,
    rounds=100,
    copy_bytes=1 << 30,
)
TINY = Plan(
    model={
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    prefills=(40,),
    contexts=(20,),
    verify_blocks=(1, 4),
    batches=(1, 3),
    repeats=2,
    rounds=5,
    copy_bytes=1 << 16,
)


def make_model(plan: Plan, device: torch.device, source: str | None) -> tuple[Any, int]:
    """The model in evaluation mode, and the size of its vocabulary. Raises TandemError. Any: transformers' classes."""
    if source is not None:
        files = locate(source, cache_dir=default_cache_dir(), progress=print)
        loaded = load_model(files, device=str(device), progress=print)
        return loaded.model, loaded.vocab_size
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**plan.model, tie_word_embeddings=True)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval(), int(plan.model["vocab_size"])


def make_batch(lengths: Sequence[tuple[int, int]], vocab_size: int, *, seed: int = 0) -> RaggedBatch:
    """A batch of (cached, new) tokens for each sequence, whose cache is whatever the blocks hold."""
    past, new = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    num_blocks = -(-(past + new) // BLOCK_SIZE)
    starts, block_starts = (np.concatenate([[0], counts.cumsum()]).astype(np.int32) for counts in (new, num_blocks))
    positions = np.concatenate([np.arange(p, p + n) for p, n in lengths]).astype(np.int32)
    rng = np.random.default_rng(seed)
    return RaggedBatch(
        token_ids=rng.integers(0, vocab_size, len(positions), dtype=np.int32),
        position_ids=positions,
        past_lens=past,
        sequence_starts=starts,
        decode_starts=past,
        block_table=rng.permutation(int(block_starts[-1])).astype(np.int32),
        block_starts=block_starts,
        logits_rows=np.arange(len(positions), dtype=np.int32) if new.max() < 32 else starts[1:] - 1,
    )


def make_batches(plan: Plan, runner: ModelRunner) -> list[tuple[str, RaggedBatch]]:
    """What is timed, with its name; without what is longer than the model's context."""
    named = [(f"prefill of {length}", [(0, length)]) for length in plan.prefills]
    for context in plan.contexts:
        named += [(f"{n} at {context}", [(context, n)]) for n in plan.verify_blocks]
    for n in (1, 5):
        named += [(f"{size} x {n} at {plan.contexts[0]}", [(plan.contexts[0], n)] * size) for size in plan.batches]
    return [
        (name, make_batch(lengths, runner.vocab_size))
        for name, lengths in named
        if sum(lengths[0]) <= runner.context_length
    ]


def on_blocks_of(table: RaggedBatch, batch: RaggedBatch) -> RaggedBatch:
    """`batch`, in the blocks of another one."""
    return replace(batch, block_table=table.block_table, block_starts=table.block_starts)
