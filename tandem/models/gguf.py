"""A GGUF file becomes a Hugging Face folder, once; later starts load that folder, in a second or two."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from tandem.errors import InvalidRequest, Unavailable
from tandem.models.bundled import exclusive

_CONVERSION_TIMEOUT_SECONDS = 1800.0
_WEIGHTS = "model.safetensors"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or reports of transformers on the terminal: what matters of them is checked."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def convert_gguf(file: Path, converted: Path, progress: Callable[[str], None]) -> tuple[Path, str]:
    """The Hugging Face folder made from `file`, written on the first call, and the file's SHA-256.

    Keyed by content, so it cannot be stale. Raises InvalidRequest for a file that transformers cannot read,
    Unavailable where the folder cannot be written.
    """
    try:
        digest = _sha256(file, converted)
        folder = _find(converted, digest)
        if folder is None:
            converted.mkdir(parents=True, exist_ok=True)
            lock = converted / f"{digest[:16]}.lock"
            with exclusive(lock, timeout_seconds=_CONVERSION_TIMEOUT_SECONDS, progress=progress):
                folder = _find(converted, digest) or _convert(file, converted, digest, progress)
    except OSError as error:
        raise Unavailable(
            f"cannot keep the converted {file.name} in {converted}: {error}; make room or set TANDEM_CACHE"
        ) from error
    return folder, digest


def _find(converted: Path, digest: str) -> Path | None:
    """The folder made from the file of that content, under whatever name the file had then."""
    return next(converted.glob(f"*-{digest[:16]}"), None)


def _convert(file: Path, converted: Path, digest: str, progress: Callable[[str], None]) -> Path:
    progress(f"converting {file.name}; this is done once")
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=converted) as temporary:
        whole = Path(temporary) / "model"
        _write_folder(file, whole)
        return whole.rename(converted / f"{file.stem}-{digest[:16]}")


def _write_folder(file: Path, folder: Path) -> None:
    """Write config, tokenizer and weights of a GGUF file, as transformers reads them, in Hugging Face's layout."""
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            with torch.device("meta"):  # for the names of the weights only
                skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            # `from_pretrained(gguf_file=...)` would do the same and one thing more: ask for accelerate.
            weights: dict[str, torch.Tensor] = load_gguf_checkpoint(
                str(file), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.float32
            )["tensors"]
    except Exception as error:  # there is no end to what the readers below raise for a file they do not like
        raise InvalidRequest(
            f"transformers cannot read {file.name} ({error}); give the model's safetensors folder or hub id instead",
            param="model",
        ) from error
    tied = set(skeleton.all_tied_weights_keys) if config.tie_word_embeddings else set()
    if lacking := sorted(skeleton.state_dict().keys() - tied - weights.keys()):
        raise InvalidRequest(
            f"{file.name} lacks {len(lacking)} of the model's weights ({', '.join(lacking[:3])}); download it again",
            param="model",
        )
    tokenizer.save_pretrained(folder)
    # A GGUF weight is a few bits times a scale plus a minimum, worked out in float32: it seldom fits a narrower type,
    # and a float32 run of the target must not depend on how the file was stored. So: narrower only if nothing is lost.
    dtype = next((narrow for narrow in (torch.bfloat16, torch.float16) if _fits(weights, narrow)), torch.float32)
    stored = {name: weight.to(dtype).contiguous() for name, weight in weights.items() if name not in tied}
    save_file(stored, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _WEIGHTS).chmod(0o644)  # safetensors lets only the owner read; the two services may be two users
    config.dtype = dtype
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _fits(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> bool:
    return all(torch.equal(weight.to(dtype).float(), weight) for weight in weights.values())


def _sha256(file: Path, notes: Path) -> str:
    """SHA-256 (hex) of the file. A note in `notes` saves reading it again while its size and time stay the same."""
    stat = file.stat()
    known = {"file": str(file), "num_bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    note = notes / f"{hashlib.sha256(str(file).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads(note.read_bytes())
        digest = content.pop("sha256", None)
        if content == known and isinstance(digest, str):
            return digest
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a read-only cache: the file is read again next time
        notes.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({**known, "sha256": digest}))
    return digest
