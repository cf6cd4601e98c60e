"""From a Hugging Face folder to a GGUF file, for the families that the engines read from such files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors import safe_open
from transformers import PreTrainedConfig

from tandem.errors import InvalidRequest
from tandem.models.facts import context_length, end_token_ids, read_config
from tandem.models.tokenizer_files import TOKENIZER, vocabulary

_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}  # codes of general.file_type
QUANTIZATIONS = tuple(_FILE_TYPES)

_Weight = npt.NDArray[np.float32]


def export_gguf(folder: Path, destination: Path, *, quantization: str) -> None:
    """Write the model in `folder` to `destination`; matrices in `quantization`, one of QUANTIZATIONS, the rest F32.

    Raises InvalidRequest for families other than Llama, Qwen 2 and Qwen 3, and tokenizers other than BPE on bytes.
    """
    config = read_config(folder)
    if config.model_type not in _ARCHITECTURES:
        raise InvalidRequest(f"no GGUF is written for {config.model_type}, only for {', '.join(_ARCHITECTURES)}")
    writer = GGUFWriter(destination, config.model_type)
    writer.add_file_type(_FILE_TYPES[quantization])
    _add_shape(writer, config, folder.name)
    _add_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config.model_type], config.num_hidden_layers)
    matrix_type = GGMLQuantizationType[quantization]
    for name, weight in _weights(folder):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored_as = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored_as is None:
            raise InvalidRequest(f"GGUF has no place for the weight {name} of {folder}", param="model")
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = _interleave_halves(weight, heads)
        kind = matrix_type if weight.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(stored_as, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(folder: Path) -> Iterator[tuple[str, _Weight]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no dict)
                yield name, opened.get_tensor(name).float().numpy()


def _interleave_halves(weight: _Weight, heads: int) -> _Weight:
    """Rows in the order of llama.cpp's rotation, which turns neighbours, where Hugging Face's turns the two halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _add_shape(writer: GGUFWriter, config: PreTrainedConfig, name: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: GGUFWriter, folder: Path, config: PreTrainedConfig) -> None:
    content: dict[str, Any] = json.loads((folder / TOKENIZER).read_bytes())
    if content["model"].get("type") != "BPE":
        raise InvalidRequest(f"GGUF is written for BPE tokenizers only, {folder} has another", param="model")
    tokens = vocabulary(folder)
    added = {int(token["id"]) for token in content.get("added_tokens") or []}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    # Rows of the embedding that no token has are padding.
    padded = [tokens.get(i, f"[PAD{i}]") for i in range(config.vocab_size)]
    writer.add_token_list(padded)
    writer.add_token_types([
        TokenType.CONTROL if i in added else TokenType.NORMAL if i in tokens else TokenType.UNUSED
        for i in range(config.vocab_size)
    ])  # fmt: skip
    merges = content["model"].get("merges") or []
    if merges:
        writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    ends = sorted(end_token_ids(folder, config, tokens))
    # OpenVINO's reader needs all four; only the end is used by a model that marks its turns itself.
    writer.add_eos_token_id(ends[0] if ends else 0)
    writer.add_bos_token_id(config.bos_token_id if config.bos_token_id is not None else 0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(ends[0] if ends else 0)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())
