"""TorchRunner: any Hugging Face causal language model, through transformers' own modelling code, on our paged KV cache.

What is ours is the attention function and the cache behind it; everything else (embeddings, norms, rotations, linear
layers, experts) is the model's own code, run once over the packed tokens of all sequences. The way of one forward:

1. `PagedContext` turns a RaggedBatch into index tensors: where new keys and values go, and which cached ones each
   group of sequences reads. Once per forward, not once per layer.
2. The model is called with packed tokens `[1, T]`, `use_cache=False` and the context as a keyword argument, which
   transformers hands down to the attention function of every layer.
3. `paged_attention` writes the layer's new keys and values into the cache and attends, group by group.

Given a `Capture`, batches of short sequences go through `static_decode.py` instead: the same model and attention
function, in recorded steps of a few fixed shapes.

Whether a model can be served like this is found out in the constructor (`model_check.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tandem.engine import model_check
from tandem.engine.model_check import LayerShape
from tandem.engine.paged_attention import AttentionContext, PagedContext, paged_attention, to_device
from tandem.engine.partial_head import spread
from tandem.engine.runner import Ahead, Choosing, Int32Array, RaggedBatch
from tandem.engine.static_decode import Capture, Rows, StaticDecoder
from tandem.models.facts import context_length

_PAGED = "tandem_paged"  # the name of our attention function inside transformers


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in a TorchRunner's KV cache, all layers together."""
    text = config.get_text_config(decoder=True)
    per_layer = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers
    return sum(_kv_numbers_per_token(layer) for layer in per_layer) * dtype.itemsize


def _kv_numbers_per_token(layer: PreTrainedConfig) -> int:
    query_heads: int = layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None) and getattr(layer, "qk_nope_head_dim", None):
        # Multi-head latent attention: transformers expands keys and values for every head before attending.
        return query_heads * (int(layer.qk_nope_head_dim) + int(layer.qk_rope_head_dim) + int(layer.v_head_dim))
    heads = 1 if getattr(layer, "multi_query", False) else getattr(layer, "num_key_value_heads", None) or query_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // query_heads
    return 2 * int(heads) * int(head_dim)


class TorchRunner:
    """A ModelRunner (see tandem/engine/runner.py) around a transformers model, which it owns from then on.

    Works on the device and in the dtype of the model's weights. Raises InvalidRequest where the model has what paged
    attention does not do: recurrent or convolutional layers, encoders, attention sinks, position biases, chunked
    windows, attention code outside of transformers' attention interface.

    With `token_ids`, the head is for these tokens only, and the others' logits are -inf.

    With `capture`, batches that fit a bucket of static_decode.py run as steps that it records; the KV cache is then one
    block larger than `num_blocks`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        capture: Capture | None = None,
        token_ids: Int32Array | None = None,
    ) -> None:
        if block_size < 1 or num_blocks < 1:
            raise ValueError(f"need at least one block of one token, got {num_blocks} blocks of {block_size}")
        self._model = model.eval()
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._last_step_size = 0
        self._head_input = self._last_states = torch.empty(0, 0)
        model_check.refuse_by_configuration(model, vocab_size=vocab_size)
        AttentionInterface.register(_PAGED, paged_attention)
        AttentionInterface.register(model_check.RECORDING, model_check.recording_attention)
        # The paged function gets no mask function: then transformers makes no mask, which for packed tokens would be
        # [T, T] and wrong. The recording one gets one that tells what the mask would have been.
        AttentionMaskInterface.register(model_check.RECORDING, model_check.recording_mask)

        own_attention = model_check.attention_of(model)
        watching = self._watch_head()
        self._device = next(model.parameters()).device
        self._token_ids: torch.Tensor | None = None  # checked with its whole head first
        try:
            shapes = model_check.inspect(model)
            self._context_length = min(context_length(model.config), num_blocks * block_size)
            spare_blocks = 0 if capture is None else 1
            self._storages, self._keys, self._values = _allocate(shapes, num_blocks + spare_blocks, block_size, model)
            self._static = self._static_decoder(capture)
            model.set_attn_implementation(own_attention)
            length = min(model_check.PROBE_TOKENS, self._context_length)
            reference = model_check.reference_logits(model, length)[:, :vocab_size]
            model_check.switch_attention(model, _PAGED)
            model_check.check_against_reference(model, self, reference)
        except BaseException:
            model.set_attn_implementation(own_attention)  # leave a refused model as it came
            watching.remove()
            raise
        if token_ids is not None:
            self._token_ids = to_device(token_ids, self._device).long()
            model.set_output_embeddings(_rows_of(model.get_output_embeddings(), self._token_ids))
            self._static = self._static_decoder(capture)  # steps recorded so far have the whole head
            self._watch_head()

    def _watch_head(self) -> RemovableHandle:
        """Keep what the head reads: transformers returns it only with the states of all layers."""

        def keep(_head: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            self._head_input = given[0]

        handle: RemovableHandle = self._model.get_output_embeddings().register_forward_pre_hook(keep)
        return handle

    def _static_decoder(self, capture: Capture | None) -> StaticDecoder | None:
        if capture is None:
            return None
        return StaticDecoder(
            self._compute,
            self._keys,
            self._values,
            block_size=self._block_size,
            spare_block=self._num_blocks,
            capture=capture,
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def context_length(self) -> int:
        """The model's own, or what the cache holds where that is less."""
        return self._context_length

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV cache."""
        return sum(storage.nbytes for storage in self._storages)

    def step_size(self, num_sequences: int, *, tokens_each: int) -> int:
        """As many as there are: nothing is filled up."""
        return num_sequences * tokens_each

    @property
    def last_step_size(self) -> int:
        return self._last_step_size

    @property
    def last_states(self) -> torch.Tensor:
        return self._last_states

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [R, vocab_size], float32, contiguous, on the model's device. See ModelRunner."""
        self._last_step_size = batch.num_tokens
        rows = None if self._static is None else self._static.forward(batch)
        if rows is None:
            rows = self._compute(
                to_device(batch.token_ids, self._device)[None],
                to_device(batch.position_ids, self._device)[None],
                PagedContext(batch, self._block_size, self._keys, self._values),
                to_device(batch.logits_rows, self._device),
            )
        self._last_states = rows.states
        return rows.logits

    @torch.inference_mode()
    def forward_ahead(self, batch: RaggedBatch, choosing: Sequence[Choosing]) -> Ahead | None:
        """See AheadRunner. Only with `capture`: launched one by one, steps gain nothing by it."""
        ahead = None if self._static is None else self._static.forward_ahead(batch, choosing)
        if ahead is not None:
            self._last_step_size = batch.num_tokens
        return ahead

    def _compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> Rows:
        """Rows [R] of packed tokens [1, T]; all T where `rows` is None."""
        # Any: PreTrainedModel declares no forward of its own.
        output: Any = self._model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,  # 0: transformers' word for all
            tandem_context=context,
        )
        states = self._head_input.flatten(0, -2).float()
        if self._token_ids is not None:
            return Rows(spread(output.logits[0], self._token_ids, vocab_size=self._vocab_size), states)
        logits: torch.Tensor = output.logits[0, :, : self._vocab_size]
        return Rows(logits.float().contiguous(), states)

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks of all layers, pair by pair: a destination may be the source of a later pair."""
        if set(sources) & set(destinations):
            pairs = [([source], [destination]) for source, destination in zip(sources, destinations, strict=True)]
        else:
            pairs = [(list(sources), list(destinations))]
        for source, destination in pairs:
            for storage in self._storages:
                storage.index_copy_(
                    1,
                    torch.tensor(destination, device=self._device),
                    storage.index_select(1, torch.tensor(source, device=self._device)),
                )


def _rows_of(head: Any, token_ids: torch.Tensor) -> torch.nn.Linear:
    """A head for these tokens only."""
    part = torch.nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None, device="meta")
    part.weight = torch.nn.Parameter(head.weight[token_ids], requires_grad=False)
    if head.bias is not None:
        part.bias = torch.nn.Parameter(head.bias[token_ids], requires_grad=False)
    return part


def _allocate(
    shapes: Sequence[LayerShape], num_blocks: int, block_size: int, model: PreTrainedModel
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Storages [tensors of one shape, num_blocks, block_size, H, D]; per layer, views of keys and values [slots, H, D].

    Layers of one shape share a storage, so that copying blocks is one operation, and not two for every layer.
    """
    tensor_shapes = [(shape.num_heads, dim) for shape in shapes for dim in (shape.key_dim, shape.value_dim)]
    storages: dict[tuple[int, int], torch.Tensor] = {}
    for heads, dim in dict.fromkeys(tensor_shapes):
        size = (tensor_shapes.count((heads, dim)), num_blocks, block_size, heads, dim)
        storages[heads, dim] = torch.zeros(size, dtype=model.dtype, device=next(model.parameters()).device)
    unused = {shape: iter(storage) for shape, storage in storages.items()}
    views = [next(unused[shape]).flatten(0, 1) for shape in tensor_shapes]
    return list(storages.values()), views[0::2], views[1::2]
