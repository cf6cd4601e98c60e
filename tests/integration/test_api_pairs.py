"""Which drafts go with which targets, told by the real services."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.stack import Stack
from tests.tiny_models import byte_tokenizer, write_draft

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "Once upon a time, "


def write_model(folder: Path, *, vocab_size: int, num_extra: int = 0) -> Path:
    """A small random model whose embeddings have `vocab_size` rows, however many tokens its tokenizer has."""
    tokenizer = byte_tokenizer(num_extra=num_extra)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder


def pad_vocabulary(source: Path, folder: Path, *, vocab_size: int) -> Path:
    """The same model with rows for tokens that do not exist, large ones, so that a law that forgets to mask them shows
    it."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    size = model.config.vocab_size
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[size:] = 10 * model.lm_head.weight[:size].abs().amax()
    model.save_pretrained(folder, safe_serialization=True)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_h1_a_padded_vocabulary_is_accepted_where_the_tokenizers_are_equal(tmp_path: Path, target_folder: Path) -> None:
    draft = write_draft(target_folder, tmp_path / "draft", noise=0.05)
    padded = pad_vocabulary(draft, tmp_path / "padded", vocab_size=320)
    with Stack(folder=tmp_path, target_model=str(target_folder), draft_model=str(padded)) as stack:
        for body in ({"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 1}):
            wanted = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, **body}
            answer = stack.complete(**wanted, speculation={"num_draft_tokens": 4, "drafter": "model"})
            assert answer["speculation"]["accepted"] > 0
            assert max(answer["choices"][0]["token_ids"]) < 260
            if body["temperature"] == 0 or "seed" in body:
                plain = stack.complete(**wanted, speculation={"enabled": False})
                assert answer["choices"] == plain["choices"]


def test_f16_a_draft_with_another_tokenizer_is_refused_with_both_fingerprints(
    tmp_path: Path, target_folder: Path
) -> None:
    """And requests are served without it."""
    other = write_model(tmp_path / "other", vocab_size=263, num_extra=3)
    stack = Stack(folder=tmp_path, target_model=str(target_folder), draft_model=str(other))
    try:
        for service in stack.services:
            service.start()
        stack.wait_until("degraded")
        message = ""
        for _ in range(600):
            time.sleep(0.1)
            readiness = stack.readiness()
            assert isinstance(readiness, dict)
            message = " ".join(readiness["reasons"])
            if "tokenizer" in message and "is not the target's" in message:
                break
        assert str(other.name) in message
        assert str(target_folder.name) in message
        fingerprints = {part for part in message.replace(")", " ").split() if len(part) >= 16 and part.isalnum()}
        assert len(fingerprints) == 2, message
        answer = stack.complete(prompt=PROMPT, max_tokens=5)
        assert (answer["usage"]["completion_tokens"], answer["speculation"]["drafted"]) == (5, 0)
    finally:
        stack.close()
