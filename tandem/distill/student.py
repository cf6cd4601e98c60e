"""The student: a model of the target's family with a few of its layers, which share its embeddings and head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tandem.distill.dataset import Example
from tandem.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Examples side by side, padded at their ends: causal attention never looks there, so no mask is needed."""

    token_ids: torch.Tensor  # [B, T]
    rows: torch.Tensor  # [A], places in the flattened [B * T] whose next token is an answer's
    target_ids: torch.Tensor  # [A, top], places in the draft's vocabulary
    target_probs: torch.Tensor  # [A, top], zero where the draft's vocabulary lacks the token


class Student:
    """A model that is trained, and the frozen head for the tokens of its vocabulary.

    `vocabulary` [V] are the token ids that the draft can say, ascending.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: npt.NDArray[np.int64], *, bfloat16: bool) -> None:
        self.model: Any = model
        self.vocabulary = vocabulary
        self._bfloat16 = bfloat16
        self._places = np.full(int(model.config.get_text_config().vocab_size), -1, dtype=np.int64)
        self._places[vocabulary] = np.arange(len(vocabulary))
        for embedding in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            embedding.weight.requires_grad = False
        self.head = self.model.get_output_embeddings().weight[torch.from_numpy(vocabulary)].detach().clone()

        # The gradient needs no more than the numbers that the rest is computed in.
        self.head_for_training = self.head.bfloat16() if bfloat16 else self.head

    @property
    def device(self) -> torch.device:
        device: torch.device = self.head.device
        return device

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by name: the layers and the last norm."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def hidden(self, batch: Batch) -> torch.Tensor:
        """What the head reads at the batch's rows: [A, hidden size], float32."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bfloat16):
            states = self.model.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        rows: torch.Tensor = states.reshape(-1, states.shape[-1])[batch.rows].float()
        return rows

    def batch(self, examples: Sequence[Example]) -> Batch:
        longest = max(map(len, examples))
        token_ids = np.zeros((len(examples), longest), dtype=np.int64)
        rows: list[npt.NDArray[np.int64]] = []
        for index, example in enumerate(examples):
            token_ids[index, : len(example)] = example.token_ids
            rows.append(index * longest + np.arange(example.prompt_length - 1, len(example) - 1))
        places = self._places[np.concatenate([example.top_ids for example in examples])]
        log_probs = np.concatenate([example.top_log_probs for example in examples]).astype(np.float32)
        probs = np.where(places < 0, 0.0, np.exp(log_probs)).astype(np.float32)
        return Batch(
            token_ids=torch.from_numpy(token_ids).to(self.device),
            rows=torch.from_numpy(np.concatenate(rows)).to(self.device),
            target_ids=torch.from_numpy(places.clip(min=0)).to(self.device),
            target_probs=torch.from_numpy(probs).to(self.device),
        )


def spread_layers(num_layers: int, total: int) -> tuple[int, ...]:
    """Which of the target's layers a student of `num_layers` starts from: the first ones, and the last."""
    if not 1 <= num_layers <= total:
        raise InvalidRequest(f"a draft has between 1 and the target's {total} layers, got {num_layers}", param="layers")
    return (*range(num_layers - 1), total - 1)


def new_student(target: PreTrainedModel, layers: Sequence[int], *, device: torch.device) -> PreTrainedModel:
    """A model with copies of those layers of `target`, its embeddings, head and last norm; float32, on `device`."""
    config = student_config(target.config, layers)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights: dict[str, torch.Tensor] = target.state_dict()
    own = model.state_dict()
    taken: dict[str, torch.Tensor] = {}
    for name in own:
        prefix, found, rest = name.partition(".layers.")
        if found:
            index, _, tail = rest.partition(".")
            taken[name] = weights[f"{prefix}.layers.{layers[int(index)]}.{tail}"]
        else:
            taken[name] = weights[name]
    model.load_state_dict(taken)
    model.to(device).train()
    student: PreTrainedModel = model
    return student


def student_config(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """The target's configuration for those of its layers."""
    own = copy.deepcopy(config)
    text = own.get_text_config(decoder=True)
    total: int = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:  # layer_types and the like
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    own.use_cache = True
    return own
