"""Whether a model can be served on paged attention: found out at start-up, so that an unknown feature is an error there
and never a wrong text.

`inspect` runs the model once with a recording attention function and refuses what it does not know; `reference_logits`
and `check_against_reference` compare the paged logits with those of the model's own attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tandem.engine.runner import ModelRunner, RaggedBatch
from tandem.errors import InvalidRequest

RECORDING = "tandem_recording"  # the name of our recording attention function inside transformers
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
# Arguments of attention functions that ours applies, and those that change nothing in it.
_KNOWN_ARGUMENTS = frozenset({"scaling", "sliding_window", "softcap", "is_causal", "tandem_context"}) | frozenset(
    {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
PROBE_TOKENS = 12


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token."""

    num_heads: int
    key_dim: int
    value_dim: int


class _Record:
    """What `recording_attention` saw: each layer's shape, and reasons to refuse the model."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.problems: list[str] = []


def recording_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    tandem_context: _Record | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Note what the layer wants of its attention; the result is zeros."""
    if tandem_context is None:
        raise RuntimeError("its code does not hand keyword arguments down to the attention function")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer in tandem_context.shapes:
        tandem_context.problems.append("a layer attends twice, or without a layer_idx of its own")
        layer = -1
    tandem_context.shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
    unknown = sorted(name for name in arguments.keys() - _KNOWN_ARGUMENTS if arguments[name] is not None)
    if unknown:
        tandem_context.problems.append(f"its attention needs {', '.join(unknown)}")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        tandem_context.problems.append("its attention is not causal")
    asked = None if attention_mask is None else int(attention_mask.flatten()[0])
    if asked is not None and asked != (sliding_window or 0):
        tandem_context.problems.append("its attention mask is neither causal nor a sliding window")
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def recording_mask(
    *, q_length: int, kv_length: int, local_size: int | None = None, use_vmap: bool = False, **_: Any
) -> torch.Tensor:
    """In place of a mask, a tensor of its shape that tells its kind: 0 causal, w sliding window of w, -1 anything else.

    transformers sets `use_vmap` for masks made of functions that it does not know either.
    """
    return torch.full((1, 1, q_length, kv_length), -1 if use_vmap else local_size or 0)


def _refuse(model: PreTrainedModel, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{type(model).__name__} ({model.config.model_type}) cannot be served by TorchRunner: {reason}; "
        "choose a decoder-only model with plain attention, such as Llama, Qwen 2 or 3, Mistral, Gemma 2 or 3, or GPT-2",
        param="model",
    )


def refuse_by_configuration(model: PreTrainedModel, *, vocab_size: int) -> None:
    """The refusals that can be explained best, before anything runs."""
    config = model.config
    if config.is_encoder_decoder:
        raise _refuse(model, "it is an encoder-decoder model")
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if not kinds <= _ATTENTION_KINDS:
        raise _refuse(model, f"it has layers of the kind {', '.join(sorted(kinds - _ATTENTION_KINDS))}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise _refuse(model, f"its weights are spread over {', '.join(sorted(map(str, devices)))}")
    rows = _output_rows(model)
    if not 0 < vocab_size <= rows:
        raise ValueError(f"vocab_size must be between 1 and the model's {rows} output rows, got {vocab_size}")


def _output_rows(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()
    if head is None:
        raise _refuse(model, "it has no language modelling head")
    return int(head.weight.shape[0])


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation in use. The attribute is private, and documented as the one to read."""
    name: str = model.config.get_text_config(decoder=True)._attn_implementation  # noqa: SLF001
    return name


def switch_attention(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    if attention_of(model) != name:
        raise _refuse(model, "its code does not use transformers' attention interface")


def _probe_tokens(model: PreTrainedModel, length: int) -> torch.Tensor:
    """[1, length] ordinary token ids, all different, from the vocabulary's middle: special ones sit at its ends."""
    rows = _output_rows(model)
    return (torch.arange(length, device=next(model.parameters()).device) + rows // 2)[None] % rows


@torch.inference_mode()
def inspect(model: PreTrainedModel) -> list[LayerShape]:
    """Run the model once with `recording_attention`; its layers' shapes in order, or InvalidRequest."""
    switch_attention(model, RECORDING)
    record = _Record()
    try:
        model(input_ids=_probe_tokens(model, 2), use_cache=False, tandem_context=record)
    except Exception as error:  # whatever a model's own code raises is a reason to refuse it
        raise _refuse(model, str(error)) from error
    if record.problems:
        raise _refuse(model, "; ".join(dict.fromkeys(record.problems)))
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(record.shapes) != list(range(num_layers)):
        raise _refuse(model, f"only {len(record.shapes)} of its {num_layers} layers attend through the interface")
    return [record.shapes[layer] for layer in range(num_layers)]


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Logits [length, rows] of the probe tokens with the model's own attention and positions."""
    output: Any = model(input_ids=_probe_tokens(model, length), use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits.float()


def check_against_reference(model: PreTrainedModel, runner: ModelRunner, reference: torch.Tensor) -> None:
    """Compare paged logits, in two chunks over scattered blocks, with `reference`; InvalidRequest where they differ."""
    length, block_size = len(reference), runner.block_size
    tokens = _probe_tokens(model, length)[0].cpu().numpy().astype(np.int32)
    blocks = np.arange(-(-length // block_size), dtype=np.int32)[::-1]
    ends = sorted({length * 2 // 3, length} - {0})
    chunks = []
    for start, end in zip([0, *ends], ends, strict=False):
        positions = np.arange(start, end, dtype=np.int32)
        batch = RaggedBatch(
            token_ids=tokens[start:end],
            position_ids=positions,
            past_lens=np.array([start], dtype=np.int32),
            sequence_starts=np.array([0, end - start], dtype=np.int32),
            decode_starts=np.array([end], dtype=np.int32),
            block_table=blocks,
            block_starts=np.array([0, len(blocks)], dtype=np.int32),
            logits_rows=positions - start,
        )
        try:
            chunks.append(runner.forward(batch).clone())  # the next may reuse its memory
        except Exception as error:  # as in inspect
            raise _refuse(model, str(error)) from error
    paged = torch.cat(chunks)
    difference = float((paged - reference).norm() / reference.norm().clamp_min(1e-20))
    # Half precision rounds differently in another order of operations (and may then choose other experts).
    if not difference <= (1e-3 if model.dtype == torch.float32 else 0.2):
        raise _refuse(model, f"its logits differ from those of its own attention by {difference:.1%}")
