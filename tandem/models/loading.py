"""From a name to a model in memory: a Hugging Face folder, a hub id, or a GGUF file.

Weights come from safetensors only (a pickle could run code), and a model's own Python code is never run. A GGUF file
is turned into a Hugging Face folder once; later starts load that folder, in a second or two.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tandem.engine.torch_runner import context_length
from tandem.errors import InvalidRequest, Unavailable, UnknownModel
from tandem.models.bundled import default_cache_dir
from tandem.models.gguf import convert_gguf, quiet
from tandem.models.tokenizer_files import vocabulary

Progress = Callable[[str], None]

_HUB_ID = re.compile(r"(?P<id>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, ready for a runner, and what the services say of it."""

    model: PreTrainedModel  # in eval mode, on `device`, in `dtype`
    folder: Path  # holds the tokenizer's files
    model_id: str
    revision: str  # commit on the hub, SHA-256 of a GGUF file, or empty for a plain folder
    vocab_size: int  # of the tokenizer: without the padding that the model's embeddings may have
    context_length: int  # tokens
    end_token_ids: tuple[int, ...]  # ascending
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Source:
    """A model's files on this machine, and its name."""

    folder: Path
    model_id: str
    revision: str


def load_model(
    source: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    cache_dir: Path | None = None,
    num_layers: int | None = None,
    progress: Progress = lambda message: None,
) -> LoadedModel:
    """Load a causal language model for inference.

    `source` is a Hugging Face folder, a hub id ("organisation/name", or "organisation/name@revision"), or a .gguf
    file. `device` is "auto", "cpu", "cuda" or "cuda:1"; `dtype` is "auto" (see `choose_dtype`), "float32", "bfloat16"
    or "float16". Converted GGUF files are kept in `cache_dir` (default: `default_cache_dir()`).

    `num_layers` keeps the first layers of the checkpoint only: the model as its own draft (self-speculation).

    Raises UnknownModel, Unavailable or InvalidRequest with a message that says what to do.
    """
    place = choose_device(device)
    number_type = choose_dtype(dtype, place)
    found = _locate(str(source), cache_dir or default_cache_dir(), progress)
    tokens = vocabulary(found.folder)
    progress(f"loading {found.model_id} in {str(number_type).removeprefix('torch.')} on {place}")
    # Any: transformers wraps `to`, and leaves `eval` and others untyped.
    model: Any = _load_folder(found, number_type, num_layers)
    rows = min(_rows(model.get_input_embeddings()), _rows(model.get_output_embeddings()))
    vocab_size = min(max(tokens) + 1, rows)
    return LoadedModel(
        model=model.to(place).eval(),
        folder=found.folder,
        model_id=found.model_id if num_layers is None else f"{found.model_id}:first-{num_layers}-layers",
        revision=found.revision,
        vocab_size=vocab_size,
        context_length=context_length(model.config),
        end_token_ids=_end_token_ids(model, found.folder, tokens, vocab_size),
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


def _locate(source: str, cache_dir: Path, progress: Progress) -> _Source:
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        folder, digest = convert_gguf(path.resolve(), cache_dir / "converted", progress)
        return _Source(folder, path.stem, digest)
    if path.is_dir():
        return _named_folder(path.resolve())
    if path.is_file():
        raise InvalidRequest(f"{source} is neither a folder nor a .gguf file; name the model's folder", param="model")
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id is None or path.suffix == ".gguf" or source.startswith((".", "~", "/")):
        raise UnknownModel(f"there is no {source}; check the path, or name a model of the Hugging Face hub")
    return _download(hub_id["id"], hub_id["revision"], progress)


def _named_folder(folder: Path) -> _Source:
    """A folder's name; those inside the hub's own cache are `models--<organisation>--<name>/snapshots/<commit>`."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        model_id = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return _Source(folder, model_id, folder.name)
    return _Source(folder, folder.name, "")


def _download(model_id: str, revision: str | None, progress: Progress) -> _Source:
    progress(f"looking for {model_id} on the Hugging Face hub, and in its cache here")
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=["*.json", "*.jinja", "*.safetensors"],
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
        )
    except hub_errors.GatedRepoError as error:
        raise InvalidRequest(
            f"{model_id} asks you to accept its terms: do so on its page on the hub, then set HF_TOKEN", param="model"
        ) from error
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        raise UnknownModel(
            f"the Hugging Face hub has no {model_id}{at}, and there is no such folder here; check the name (private "
            "models need HF_TOKEN)"
        ) from error
    except (hub_errors.HfHubHTTPError, OSError) as error:
        raise Unavailable(
            f"cannot fetch {model_id} from the Hugging Face hub ({error}); download it on a machine that reaches the "
            "hub (hf download) and give the folder's path instead"
        ) from error
    return _Source(Path(folder), model_id, Path(folder).name)


def _load_folder(found: _Source, dtype: torch.dtype, num_layers: int | None) -> PreTrainedModel:
    folder = found.folder
    if not (folder / "config.json").is_file():
        raise InvalidRequest(f"no config.json in {folder}; it must be a model's Hugging Face folder", param="model")
    if not any(folder.glob("*.safetensors")):
        raise InvalidRequest(
            f"no .safetensors weights in {folder}, and other formats are not loaded, since they can run code; choose a "
            "revision of the model with safetensors, or convert it with save_pretrained where you trust it",
            param="model",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if num_layers is not None:
            _keep_layers(config, num_layers)
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
    except InvalidRequest:
        raise
    except Exception as error:  # transformers and safetensors raise nearly everything for a folder they do not like
        raise InvalidRequest(f"cannot load {found.model_id} from {folder}: {error}", param="model") from error
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


def _end_token_ids(model: PreTrainedModel, folder: Path, tokens: dict[int, str], vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text: those of the generation config, as in `generate`, and the tokenizer's own."""
    configured: Any = getattr(model.generation_config, "eos_token_id", None)
    ids = set(configured) if isinstance(configured, (list, tuple)) else {configured}
    with contextlib.suppress(FileNotFoundError):
        eos = json.loads((folder / "tokenizer_config.json").read_bytes()).get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        ids.update(token_id for token_id, token in tokens.items() if token == text)
    return tuple(sorted(int(i) for i in ids if i is not None and 0 <= i < vocab_size))
