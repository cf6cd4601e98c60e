"""From settings to a running engine: a loaded model, its runner, and the worker that owns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tandem.engine.cuda_graphs import CudaGraphs
from tandem.engine.draft_head import DraftHead, TorchDraftHead, read_draft_head
from tandem.engine.runner import AheadRunner, ModelRunner, RaggedBatch
from tandem.engine.step_times import StepTimes, measure, measure_change
from tandem.engine.torch_runner import TorchRunner, kv_bytes_per_token
from tandem.engine.worker import Worker
from tandem.errors import InvalidRequest
from tandem.models.bundled import (
    BUNDLED,
    BUNDLED_DRAFT,
    DRAFTS,
    bundled_layers,
    default_cache_dir,
    fetch_bundled,
)
from tandem.models.bundled_draft import put_together
from tandem.models.draft_vocabulary import TokenIds, draft_vocabulary
from tandem.models.facts import context_length, end_token_ids_of, read_config
from tandem.models.loading import choose_device, load_model
from tandem.models.locate import ModelFiles, locate
from tandem.models.openvino_files import has_openvino_form, openvino_model
from tandem.models.tokenizer_files import tokenizer_files, tokenizer_fingerprint, vocabulary
from tandem.service_metrics import ServiceMetrics
from tandem.settings import EngineSettings
from tandem.types import ModelInfo

Progress = Callable[[str], None]

_TORCH_BLOCK_SIZE = 32  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A model ready to work. `close` the worker in the end."""

    worker: Worker
    info: ModelInfo
    end_token_ids: tuple[int, ...]
    tokenizer_files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A runner, and what it runs on. `ahead` is the runner where it records its steps, which may then go on."""

    runner: ModelRunner
    engine: str
    device: str
    dtype: str
    ahead: AheadRunner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """How much of a model to load; None: all of it."""

    num_layers: int | None
    token_ids: TokenIds | None  # that the head is for


def start_engine(
    source: str,
    settings: EngineSettings,
    *,
    name: str,
    max_programs: int,
    metrics: ServiceMetrics,
    num_layers: int | None = None,
    is_draft: bool = False,
    progress: Progress,
) -> Engine:
    """Load `source` (`bundled`, a folder, hub id or .gguf) and start its worker. Raises TandemError saying what to do.

    Only with `is_draft` it may be a model whose head lacks tokens. The context is the model's own, or what the KV cache
    holds where that is less.
    """
    files = find_model(source, progress)
    started = start_runner(files, settings, num_layers=num_layers, is_draft=is_draft, progress=progress)
    runner = started.runner
    progress("measuring how long a forward takes")
    worker = Worker(
        runner,
        name=name,
        max_step_tokens=settings.max_step_tokens,
        max_programs=max_programs,
        observer=metrics,
        step_times=_measured(runner),
        ahead=started.ahead,
    )
    metrics.watch_engine(
        blocks_held=lambda: worker.pool.num_held,
        blocks=runner.num_blocks,
        programs=lambda: worker.num_programs,
        cached_sessions=lambda: worker.num_sessions,
    )
    worker.start()
    ends = end_token_ids_of(files.folder)
    return Engine(
        worker=worker,
        info=ModelInfo(
            model_id=files.model_id if num_layers is None else f"{files.model_id}:first-{num_layers}-layers",
            revision=files.revision,
            vocab_size=runner.vocab_size,
            tokenizer_fingerprint=tokenizer_fingerprint(files.folder),
            context_length=runner.context_length,
            device=started.device,
            dtype=started.dtype,
            engine=started.engine,
        ),
        end_token_ids=tuple(sorted(i for i in ends if 0 <= i < runner.vocab_size)),
        tokenizer_files=tokenizer_files(files.folder),
    )


def start_draft_head(path: Path, engine: Engine, *, threads: int) -> DraftHead:
    """The draft head in a file, where the engine's model is. Raises InvalidRequest where it does not go with it."""
    state_width = engine.worker.runner.last_states.shape[-1]  # of the steps that were measured
    weights = read_draft_head(path, model=engine.info, state_width=state_width)
    if engine.info.device == "cpu":  # beside engine torch, too: 0.9 ms there, where Torch takes 2
        from tandem.engine.openvino_head import OpenVinoDraftHead

        return OpenVinoDraftHead(weights, threads=threads)
    return TorchDraftHead(weights, device=torch.device(engine.info.device), dtype=getattr(torch, engine.info.dtype))


def _measured(runner: ModelRunner) -> StepTimes:
    def run(num_tokens: int) -> None:
        _run_once(runner, num_tokens)

    most = runner.context_length
    return StepTimes(measure(run, most_tokens=most), change_seconds=measure_change(run, most_tokens=most))


def _run_once(runner: ModelRunner, num_tokens: int) -> None:
    """One forward of a text of so many tokens, in the first blocks, before anybody uses them."""
    blocks = np.arange(-(-num_tokens // runner.block_size), dtype=np.int32)
    batch = RaggedBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        position_ids=np.arange(num_tokens, dtype=np.int32),
        past_lens=np.zeros(1, dtype=np.int32),
        sequence_starts=np.array([0, num_tokens], dtype=np.int32),
        decode_starts=np.zeros(1, dtype=np.int32),
        block_table=blocks,
        block_starts=np.array([0, len(blocks)], dtype=np.int32),
        logits_rows=np.arange(num_tokens, dtype=np.int32),
    )
    # The maximum is looked at so that a device's work is done, not only begun.
    runner.forward(batch).amax().item()


def prepare_model(source: str, progress: Progress) -> None:
    """Fetch and convert what `start_engine` would, and see that the model loads. Raises TandemError."""
    files = find_model(source, progress)
    if has_openvino_form(files):
        try:
            openvino_model(files, progress)
        except InvalidRequest as error:
            progress(f"engine openvino does not take this model: {error.message}")
    # One layer shows whether it loads, without the memory of all of them.
    load_model(files, device="cpu", dtype="float32", num_layers=1, progress=progress)


def find_model(source: str, progress: Progress) -> ModelFiles:
    """The files of `source` (`bundled`, `bundled-draft`, a folder, hub id or .gguf), fetched if need be.

    Raises TandemError, saying what to do.
    """
    cache_dir = default_cache_dir()
    path: Path | str = source
    if source == BUNDLED:
        path = fetch_bundled(cache_dir, progress)
    elif source == BUNDLED_DRAFT:
        path = put_together(bundled_layers(), fetch_bundled(cache_dir, progress), cache_dir / DRAFTS, progress)
    return locate(str(path), cache_dir=cache_dir, progress=progress)


def start_runner(
    files: ModelFiles,
    settings: EngineSettings,
    *,
    num_layers: int | None = None,
    is_draft: bool = False,
    progress: Progress,
) -> Started:
    """A runner alone, for one who batches without a worker. Raises TandemError."""
    token_ids = draft_vocabulary(files, vocab_size=max(vocabulary(files.folder)) + 1)
    if token_ids is not None and not is_draft:
        raise InvalidRequest(
            f"{files.model_id} is a draft whose head knows {len(token_ids):,} tokens only, so it would never say the "
            "others; name its target as the model, and this one as the draft model",
            param="model",
        )
    wanted = _Wanted(num_layers=num_layers, token_ids=token_ids)
    if settings.engine == "openvino":
        return _start_openvino(files, settings, wanted, progress)
    on_cpu = choose_device(settings.device).type == "cpu"
    if settings.engine == "auto" and on_cpu and settings.dtype != "float16" and has_openvino_form(files):
        try:
            return _start_openvino(files, settings, wanted, progress)
        except InvalidRequest as error:
            progress(f"engine openvino does not take this model, so engine torch does: {error.message}")
    return _start_torch(files, settings, wanted, progress)


def _start_openvino(files: ModelFiles, settings: EngineSettings, wanted: _Wanted, progress: Progress) -> Started:
    # A second; services on GPUs do without it.
    from tandem.engine.openvino_runner import OpenVinoRunner, choose_precision

    if choose_device(settings.device).type != "cpu" and settings.device != "auto":
        raise InvalidRequest("engine openvino runs on the CPU; choose device cpu, or engine torch", param="device")
    # All that Torch does here is the arithmetic of laws. To wake threads for 50,000 numbers costs 0.2 ms a round.
    torch.set_num_threads(1)
    precision = choose_precision(settings.dtype, torch.cpu.get_capabilities())
    model_file = openvino_model(files, progress)
    progress(f"loading {files.model_id} with OpenVINO, computing in {precision.dtype}")
    runner = OpenVinoRunner(
        model_file,
        most_token_ids=max(vocabulary(files.folder)) + 1,
        context_length=context_length(read_config(files.folder)),
        kv_cache_bytes=settings.kv_cache_bytes,
        fixed_step_bytes=settings.fixed_step_bytes,
        threads=settings.threads,
        precision=precision,
        num_layers=wanted.num_layers,
        token_ids=wanted.token_ids,
        attends_in_blocks=settings.attends_in_blocks,
    )
    if settings.block_size not in (None, runner.block_size):
        raise InvalidRequest(
            f"block_size is {runner.block_size} with engine openvino; leave it out", param="block_size"
        )
    return Started(runner=runner, engine="openvino", device="cpu", dtype=precision.dtype)


def _start_torch(files: ModelFiles, settings: EngineSettings, wanted: _Wanted, progress: Progress) -> Started:
    torch.set_num_threads(settings.threads)
    loaded = load_model(
        files, device=settings.device, dtype=settings.dtype, num_layers=wanted.num_layers, progress=progress
    )
    block_size = settings.block_size or _TORCH_BLOCK_SIZE
    bytes_per_block = kv_bytes_per_token(loaded.model.config, loaded.dtype) * block_size
    num_blocks = settings.kv_cache_bytes // bytes_per_block
    if num_blocks < 2:
        raise InvalidRequest(f"kv_cache_bytes must hold at least two blocks of {bytes_per_block} bytes")
    graphs = CudaGraphs(loaded.device) if settings.cuda_graphs and loaded.device.type == "cuda" else None
    runner = TorchRunner(
        loaded.model,
        vocab_size=loaded.vocab_size,
        block_size=block_size,
        num_blocks=num_blocks,
        capture=graphs,
        token_ids=wanted.token_ids,
    )
    return Started(
        runner=runner,
        engine="torch",
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        ahead=None if graphs is None else runner,
    )
