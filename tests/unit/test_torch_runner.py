"""TorchRunner against transformers itself: tiny random models, float32, zero differences in greedy text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from tandem.engine.torch_runner import TorchRunner, kv_bytes_per_token
from tandem.errors import InvalidRequest
from tandem.models.facts import context_length
from tests.tiny_families import (
    BLOCK,
    COMMON,
    FAMILIES,
    ROWS,
    VOCAB,
    WINDOW,
    Chunk,
    assert_same,
    from_config,
    make_model,
    pack,
    prompt,
    whole,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def make_runner(family: str, *, num_blocks: int = 64) -> TorchRunner:
    return TorchRunner(make_model(family), vocab_size=VOCAB, block_size=BLOCK, num_blocks=num_blocks)


@dataclass
class Text:
    """One sequence at a runner, with the blocks it may use."""

    runner: TorchRunner
    blocks: Sequence[int]
    tokens: list[int] = field(default_factory=list)

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [len(tokens), vocab] after each of the tokens."""
        logits = self.runner.forward(pack([Chunk(tokens, len(self.tokens), self.blocks)])).clone()
        self.tokens.extend(tokens)
        return logits


IN_ORDER = list(range(24))
SCATTERED = [int(block) for block in np.random.default_rng(3).permutation(64)]


@pytest.mark.parametrize("blocks", [IN_ORDER, SCATTERED], ids=["in order", "scattered"])
@pytest.mark.parametrize("length", [1, 5, 11, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate(family: str, length: int, blocks: list[int]) -> None:
    text = Text(make_runner(family), blocks)
    logits = text.feed(prompt(length))[-1:]
    generated: list[int] = []
    for _ in range(24):
        generated.append(int(logits[-1].argmax()))
        logits = text.feed(generated[-1:])

    model = make_model(family)
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt(length)]),
            max_new_tokens=24,
            do_sample=False,
            suppress_tokens=list(range(VOCAB, ROWS)),
            attention_mask=torch.ones(1, length, dtype=torch.long),
        )
    assert generated == expected[0, length:].tolist()
    assert len(set(generated)) > 3  # a constant text would prove little


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_odd_chunks_equals_whole(family: str) -> None:
    tokens = prompt(90)
    expected = whole(family, tokens)
    for sizes in ([90], [1, 2, 3, 5, 7, 40, 32], [33, 57], [60, 30]):
        text = Text(make_runner(family), SCATTERED)
        parts = [text.feed(tokens[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
        assert_same(torch.cat(parts), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_equals_one_by_one(family: str) -> None:
    """Sequences at different positions, with different numbers of new tokens, in blocks strewn over the pool."""
    lengths = [3, 60, 17, 1, 100, 18, 40]
    new = [1, 9, 5, 1, 1, 1, 35]  # single tokens, verify blocks, a prefill chunk
    runner = make_runner(family, num_blocks=128)
    order = np.random.default_rng(5).permutation(128).tolist()
    chunks, expected = [], []
    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        tokens = prompt(length, seed=i)
        blocks, order = order[: -(-length // BLOCK)], order[-(-length // BLOCK) :]
        if length > count:
            runner.forward(pack([Chunk(tokens[:-count], 0, blocks)]))
        chunks.append(Chunk(tokens[-count:], max(0, length - count), blocks))
        expected.append(whole(family, tokens)[-count:])
    chunks[2].rows, expected[2] = "last", expected[2][-1:]
    chunks[4].rows, expected[4] = "none", expected[4][:0]
    assert_same(runner.forward(pack(chunks)), torch.cat(expected))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_batch_of_single_tokens_equals_one_by_one(family: str) -> None:
    runner = make_runner(family, num_blocks=128)
    chunks, expected = [], []
    for i in range(6):
        tokens = prompt(20 + 5 * i, seed=i)
        blocks = list(range(i, 128, 6))
        runner.forward(pack([Chunk(tokens[:-1], 0, blocks, rows="none")]))
        chunks.append(Chunk(tokens[-1:], len(tokens) - 1, blocks))
        expected.append(whole(family, tokens)[-1:])
    assert_same(runner.forward(pack(chunks)), torch.cat(expected))


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_block_equals_single_steps(family: str, count: int) -> None:
    tokens = prompt(30 + count)
    runner = make_runner(family)
    block, single = Text(runner, SCATTERED[:32]), Text(runner, SCATTERED[32:])
    block.feed(tokens[:30])
    single.feed(tokens[:30])
    logits = block.feed(tokens[30:])
    assert_same(logits, torch.cat([single.feed([token]) for token in tokens[30:]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_leaves_no_trace(family: str) -> None:
    text = Text(make_runner(family), SCATTERED)
    text.feed(prompt(25))
    text.feed(prompt(9, seed=1))  # rejected
    del text.tokens[20:]
    again = prompt(20)[:20] + prompt(6, seed=2)
    assert_same(text.feed(again[20:]), whole(family, prompt(25)[:20] + again[20:])[20:])


def test_copied_blocks_continue_alike_and_apart() -> None:
    runner = make_runner("qwen3")
    original = Text(runner, [5, 9, 2, 30, 31])
    original.feed(prompt(14))
    runner.copy_blocks([5, 9, 2, 30], [40, 8, 60, 50])
    fork = Text(runner, [40, 8, 60, 50, 51], tokens=list(original.tokens))
    left, right = prompt(3, seed=1), prompt(3, seed=2)
    assert_same(fork.feed(left), whole("qwen3", prompt(14) + left)[14:])
    assert_same(original.feed(right), whole("qwen3", prompt(14) + right)[14:])


def test_blocks_are_copied_pair_by_pair() -> None:
    runner = make_runner("llama")
    runner.forward(pack([Chunk(prompt(4), 0, [0], rows="none")]))
    runner.copy_blocks([0, 1], [1, 2])
    fork = Text(runner, [2, 3], tokens=prompt(4))
    assert_same(fork.feed([7]), whole("llama", [*prompt(4), 7])[4:])


def test_a_sick_sequence_cannot_poison_another_of_its_group() -> None:
    """A group pads the shorter sequence's keys; the padding must not be another's keys, whose NaN survives a mask."""
    runner = make_runner("llama")
    short, long = prompt(6, seed=1), prompt(30, seed=2)
    runner.forward(pack([Chunk(short[:-1], 0, [1, 2]), Chunk(long[:-1], 0, list(range(10, 18)))]))
    for cache in (*runner._keys, *runner._values):
        cache[10 * BLOCK : 18 * BLOCK] = torch.nan
    logits = runner.forward(pack([Chunk(short[-1:], 5, [1, 2]), Chunk(long[-1:], 29, list(range(10, 18)))]))
    assert_same(logits[:1], whole("llama", short)[-1:])


def test_logits_are_float32_without_padding_even_when_none_are_wanted() -> None:
    runner = TorchRunner(make_model("llama").to(torch.bfloat16), vocab_size=VOCAB, block_size=BLOCK, num_blocks=8)
    logits = runner.forward(pack([Chunk(prompt(5), 0, [0, 1])]))
    assert logits.dtype == torch.float32
    assert logits.shape == (5, VOCAB)
    assert logits.is_contiguous()
    assert runner.forward(pack([Chunk(prompt(5), 0, [0, 1], rows="none")])).shape == (0, VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_takes_what_the_configuration_says(family: str) -> None:
    runner = make_runner(family, num_blocks=10)
    assert runner.kv_bytes == 10 * BLOCK * kv_bytes_per_token(FAMILIES[family](), torch.float32)
    assert runner.context_length == 10 * BLOCK  # what the cache holds, here less than the model's own 256
    assert make_runner(family, num_blocks=256).context_length == 256


def test_context_length_stops_where_the_rotation_would_depend_on_the_batch() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.LlamaConfig(
        **COMMON, rope_parameters={**rope, "original_max_position_embeddings": 64, "factor": 4.0}
    )
    assert context_length(config) == 64
    dynamic = transformers.LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    assert context_length(dynamic) == 256


def small(**changes: Any) -> dict[str, Any]:
    return {**COMMON, **changes}


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "attention sinks": (
        lambda: transformers.GptOssConfig(**small(head_dim=16, num_local_experts=2, num_experts_per_tok=1)),
        "s_aux",
    ),
    "mamba": (
        lambda: transformers.MambaConfig(
            vocab_size=ROWS, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=None
        ),
        "linear_attention",
    ),
    "linear attention": (
        lambda: transformers.Qwen3NextConfig(
            **small(num_hidden_layers=4, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=16,
        ),
        "linear_attention",
    ),
    "chunked attention": (
        lambda: transformers.Llama4TextConfig(
            **small(head_dim=16, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=8)
        ),
        "chunked_attention",
    ),
    "bidirectional": (
        lambda: transformers.Gemma3TextConfig(
            **small(head_dim=16, sliding_window=WINDOW, use_bidirectional_attention=True)
        ),
        "not causal",
    ),
    "position biases": (
        lambda: transformers.BloomConfig(vocab_size=ROWS, hidden_size=32, n_layer=2, n_head=4),
        "attention interface",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_with_more_than_plain_attention_are_refused(kind: str) -> None:
    make_config, reason = REFUSED[kind]
    model = from_config(make_config())
    with pytest.raises(InvalidRequest, match=reason) as caught:
        TorchRunner(model, vocab_size=VOCAB, block_size=BLOCK, num_blocks=8)
    assert caught.value.param == "model"


def test_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=ROWS, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(InvalidRequest, match="encoder-decoder"):
        TorchRunner(model, vocab_size=VOCAB, block_size=BLOCK, num_blocks=8)


def test_a_mask_that_the_model_makes_up_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that windows by its mask alone, without telling its attention function, must not pass."""
    forward = transformers.models.mistral.modeling_mistral.MistralAttention.forward

    def without_window(self: Any, *arguments: Any, **named: Any) -> Any:
        self.config = transformers.MistralConfig(**COMMON, sliding_window=None)
        self.config._attn_implementation = model.config._attn_implementation
        return forward(self, *arguments, **named)

    model = make_model("mistral")
    monkeypatch.setattr(transformers.models.mistral.modeling_mistral.MistralAttention, "forward", without_window)
    with pytest.raises(InvalidRequest, match="mask"):
        TorchRunner(model, vocab_size=VOCAB, block_size=BLOCK, num_blocks=8)


def test_a_refused_model_keeps_its_own_attention() -> None:
    model = from_config(REFUSED["bidirectional"][0]())
    before = model.config._attn_implementation
    with pytest.raises(InvalidRequest):
        TorchRunner(model, vocab_size=VOCAB, block_size=BLOCK, num_blocks=8)
    assert model.config._attn_implementation == before


def test_a_vocabulary_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="output rows"):
        TorchRunner(make_model("llama"), vocab_size=ROWS + 1, block_size=BLOCK, num_blocks=8)


def test_calling_a_served_model_directly_says_what_to_do() -> None:
    model = make_model("llama")
    TorchRunner(model, vocab_size=VOCAB, block_size=BLOCK, num_blocks=8)
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        model(input_ids=torch.tensor([[1, 2]]))
