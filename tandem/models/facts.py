"""What a model's folder says of the model, without its weights: configuration, context length, end of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from tandem.errors import InvalidRequest
from tandem.models.tokenizer_files import vocabulary


def read_config(folder: Path) -> PreTrainedConfig:
    """The model's configuration. Raises InvalidRequest where there is none that transformers knows."""
    if not (folder / "config.json").is_file():
        raise InvalidRequest(f"no config.json in {folder}; it must be a model's Hugging Face folder", param="model")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises nearly everything for a file it does not like
        raise InvalidRequest(f"cannot read {folder / 'config.json'}: {error}", param="model") from error
    return config


def context_length(config: PreTrainedConfig) -> int:
    """Most tokens a sequence may have.

    Under "dynamic" and "longrope" scaling the rotation of *every* token depends on the longest sequence of the batch,
    past the length the model was first trained with. There one sequence would change another's text, and keys in the
    cache would no longer fit the queries; so for these the length before that point is the limit.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise InvalidRequest(
            f"the configuration of {config.model_type} does not say the context length; "
            "add max_position_embeddings to the model's config.json",
            param="model",
        )
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    limits = [longest]
    # One set of rotation parameters, or one for each kind of layer.
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings")
            limits.append(original or getattr(text, "original_max_position_embeddings", None) or longest)
    return min(limits)


def end_token_ids_of(folder: Path) -> frozenset[int]:
    """Of the model in `folder`, as end_token_ids."""
    return end_token_ids(folder, read_config(folder), vocabulary(folder))


def end_token_ids(folder: Path, config: PreTrainedConfig, tokens: Mapping[int, str]) -> frozenset[int]:
    """Ids that end a text: those of the generation config, as in `generate`, and the tokenizer's own."""
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # no such file: then `generate` too takes them from the model's configuration
        generation = GenerationConfig.from_model_config(config)
    configured: Any = generation.eos_token_id
    ids = set(configured) if isinstance(configured, (list, tuple)) else {configured}
    try:
        eos = json.loads((folder / "tokenizer_config.json").read_bytes()).get("eos_token")
    except FileNotFoundError:
        eos = None
    text = eos.get("content") if isinstance(eos, dict) else eos
    ids.update(token_id for token_id, token in tokens.items() if token == text)
    return frozenset(int(i) for i in ids if i is not None)
