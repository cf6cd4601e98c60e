"""Tiny random models with a real tokenizer, written as Hugging Face folders: every service runs on them for real.

The output head is scaled so that laws are peaked (a plain random model's law over 300 tokens is almost flat, and
any draft would be accepted), and attention's part of each layer is weak, so that greedy text falls into cycles (or
n-grams would never match); the weaker, the sooner. `noise` makes a draft: the target's weights plus that much relative
noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tandem.engine.runner import ModelRunner, RaggedBatch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def byte_tokenizer(*, num_extra: int = 0, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """One token per byte (ids 0 to 255), then the merged ones, the special tokens, and `num_extra` fillers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary |= {"".join(pair): len(vocabulary) + index for index, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *(f"<|extra{i}|>" for i in range(num_extra))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE, model_max_length=2048
    )


def write_target(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 3,
    context_length: int = 2048,
    sharpness: float = 4.5,
    attention: float = 0.06,
    merges: Sequence[tuple[str, str]] = (),
) -> Path:
    """A target: Llama, hidden size 64, float32, vocabulary of 260."""
    tokenizer = byte_tokenizer(merges=merges)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)  # float32, torch's default
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(attention)
    return _write(model, tokenizer, folder)


def write_draft(target: Path, folder: Path, *, noise: float, seed: int = 1) -> Path:
    """A draft of a target: its weights with relative Gaussian noise; 0 makes an equal model."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return _write(model, byte_tokenizer(), folder)


def _write(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    folder.mkdir(parents=True)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Of three tokens, all rows."""
    return runner.forward(
        RaggedBatch(
            token_ids=np.array([5, 70, 9], dtype=np.int32),
            position_ids=np.arange(3, dtype=np.int32),
            past_lens=np.zeros(1, dtype=np.int32),
            sequence_starts=np.array([0, 3], dtype=np.int32),
            decode_starts=np.zeros(1, dtype=np.int32),
            block_table=np.zeros(1, dtype=np.int32),
            block_starts=np.array([0, 1], dtype=np.int32),
            logits_rows=np.arange(3, dtype=np.int32),
        )
    ).clone()
