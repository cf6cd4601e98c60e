"""From a model's files to its weights in memory, for the Torch engine.

Weights come from safetensors only (a pickle could run code), and a model's own Python code is never run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tandem.errors import InvalidRequest
from tandem.models.facts import context_length, end_token_ids, read_config
from tandem.models.gguf import quiet
from tandem.models.locate import ModelFiles
from tandem.models.tokenizer_files import vocabulary

Progress = Callable[[str], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, ready for a runner."""

    model: PreTrainedModel  # in eval mode, on `device`, in `dtype`
    vocab_size: int  # of the tokenizer: without the padding that the model's embeddings may have
    context_length: int  # tokens
    end_token_ids: tuple[int, ...]  # ascending
    device: torch.device
    dtype: torch.dtype


def load_model(
    files: ModelFiles,
    *,
    device: str = "auto",
    dtype: str = "auto",
    num_layers: int | None = None,
    progress: Progress = lambda message: None,
) -> LoadedModel:
    """Load a causal language model for inference.

    `device` is "auto", "cpu", "cuda" or "cuda:1"; `dtype` is "auto" (see `choose_dtype`), "float32", "bfloat16" or
    "float16". `num_layers` keeps the first layers of the checkpoint only: the model as its own draft.

    Raises InvalidRequest with a message that says what to do.
    """
    place = choose_device(device)
    number_type = choose_dtype(dtype, place)
    tokens = vocabulary(files.folder)
    progress(f"loading {files.model_id} in {str(number_type).removeprefix('torch.')} on {place}")
    # Any: transformers wraps `to`, and leaves `eval` and others untyped.
    model: Any = _load_folder(files, number_type, num_layers)
    rows = min(_rows(model.get_input_embeddings()), _rows(model.get_output_embeddings()))
    vocab_size = min(max(tokens) + 1, rows)
    ends = end_token_ids(files.folder, model.config, tokens)
    return LoadedModel(
        model=model.to(place).eval(),
        vocab_size=vocab_size,
        context_length=context_length(model.config),
        end_token_ids=tuple(sorted(i for i in ends if 0 <= i < vocab_size)),
        device=place,
        dtype=number_type,
    )


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first CUDA device where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(
            f"device must be auto, cpu, cuda or cuda:<number>, got {name!r}", param="device"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device must be auto, cpu, cuda or cuda:<number>, got {name!r}", param="device")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InvalidRequest(
                f"device {name!r} is not there: torch sees {count} CUDA devices; use cpu, or check the driver and that "
                "torch was installed with CUDA",
                param="device",
            )
        return torch.device("cuda", device.index or 0)
    return device


def choose_dtype(name: str, device: torch.device, cpu_capabilities: dict[str, Any] | None = None) -> torch.dtype:
    """The dtype of that name. "auto" is bfloat16 where the hardware computes in it; else float16 (CUDA), float32 (CPU).

    `cpu_capabilities` are torch.cpu.get_capabilities() unless given.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise InvalidRequest(f"dtype must be auto, {', '.join(_DTYPES)}, got {name!r}", param="dtype")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    can = torch.cpu.get_capabilities() if cpu_capabilities is None else cpu_capabilities
    # Without these instructions bfloat16 is emulated on CPUs, and slower than float32.
    return torch.bfloat16 if can.get("avx512_bf16") or can.get("amx_bf16") else torch.float32


def _rows(embedding: Any) -> int:
    return int(embedding.weight.shape[0])


def _load_folder(files: ModelFiles, dtype: torch.dtype, num_layers: int | None) -> PreTrainedModel:
    folder = files.folder
    config = read_config(folder)
    if num_layers is not None:
        _keep_layers(config, num_layers)
    if not any(folder.glob("*.safetensors")):
        raise InvalidRequest(
            f"no .safetensors weights in {folder}, and other formats are not loaded, since they can run code; choose a "
            "revision of the model with safetensors, or convert it with save_pretrained where you trust it",
            param="model",
        )
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers and safetensors raise nearly everything for a folder they do not like
        raise InvalidRequest(f"cannot load {files.model_id} from {folder}: {error}", param="model") from error
    model: PreTrainedModel
    report: dict[str, Any]
    model, report = loaded
    # transformers fills what a checkpoint lacks with random numbers, and only logs it.
    if lacking := sorted(report["missing_keys"]):
        raise InvalidRequest(
            f"the checkpoint in {folder} lacks {len(lacking)} of the model's weights ({', '.join(lacking[:3])}); "
            "download it again",
            param="model",
        )
    return model


def _keep_layers(config: PreTrainedConfig, num_layers: int) -> None:
    """Let the model have its first `num_layers` decoder layers only; the others' weights are then not even read."""
    text = config.get_text_config(decoder=True)
    total: int = text.num_hidden_layers
    if not 1 <= num_layers <= total:
        raise InvalidRequest(
            f"num_layers must be between 1 and the model's {total}, got {num_layers}", param="num_layers"
        )
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:  # layer_types and the like
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
