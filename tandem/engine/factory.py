"""From settings to a running engine: a loaded model, its runner, and the worker that owns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tandem.engine.torch_runner import TorchRunner, kv_bytes_per_token
from tandem.engine.worker import Worker
from tandem.errors import InvalidRequest
from tandem.models.bundled import default_cache_dir, fetch_bundled
from tandem.models.loading import load_model
from tandem.models.tokenizer_files import tokenizer_files, tokenizer_fingerprint
from tandem.service_metrics import ServiceMetrics
from tandem.settings import EngineSettings
from tandem.types import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A model ready to work. `close` the worker in the end."""

    worker: Worker
    info: ModelInfo
    end_token_ids: tuple[int, ...]
    tokenizer_files: Mapping[str, bytes]


def start_engine(
    source: str,
    settings: EngineSettings,
    *,
    name: str,
    max_programs: int,
    metrics: ServiceMetrics,
    num_layers: int | None = None,
    progress: Callable[[str], None],
) -> Engine:
    """Load `source` (`bundled`, a folder, hub id or .gguf) and start its worker. Raises TandemError saying what to do.

    The context is the model's own, or what the KV cache holds where that is less.
    """
    torch.set_num_threads(settings.threads)
    cache_dir = default_cache_dir()
    loaded = load_model(
        fetch_bundled(cache_dir, progress) if source == "bundled" else source,
        device=settings.device,
        dtype=settings.dtype,
        num_layers=num_layers,
        cache_dir=cache_dir,
        progress=progress,
    )
    bytes_per_block = kv_bytes_per_token(loaded.model.config, loaded.dtype) * settings.block_size
    num_blocks = settings.kv_cache_bytes // bytes_per_block
    if num_blocks < 2:
        raise InvalidRequest(f"kv_cache_bytes must hold at least two blocks of {bytes_per_block} bytes")
    runner = TorchRunner(
        loaded.model,
        vocab_size=loaded.vocab_size,
        block_size=settings.block_size,
        num_blocks=num_blocks,
    )
    worker = Worker(
        runner, name=name, max_step_tokens=settings.max_step_tokens, max_programs=max_programs, observer=metrics
    )
    metrics.watch_engine(
        blocks_held=lambda: worker.pool.num_held,
        blocks=num_blocks,
        programs=lambda: worker.num_programs,
        cached_sessions=lambda: worker.num_sessions,
    )
    worker.start()
    return Engine(
        worker=worker,
        info=ModelInfo(
            model_id=loaded.model_id,
            revision=loaded.revision,
            vocab_size=loaded.vocab_size,
            tokenizer_fingerprint=tokenizer_fingerprint(loaded.folder),
            context_length=runner.context_length,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            engine="torch",
        ),
        end_token_ids=loaded.end_token_ids,
        tokenizer_files=tokenizer_files(loaded.folder),
    )
