"""`python -m benchmarks.gpu_check`: whether the Torch engine does right on this GPU, and how fast. `make gpu-check`.

Two runners share one model: *eager* launches kernel by kernel, *recorded* replays CUDA graphs. Their logits are
compared, drafts step by step with drafts in one step, and the rejection rule on the GPU with that on the CPU; then
forwards are timed, each until the GPU has finished. Beside each time stands the floor: the weights, read once at the
bandwidth of a large copy on this GPU.

Without a GPU it checks nothing; `--device cpu` runs the same checks on a tiny model, to check this program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_cases import BLOCK_SIZE, FULL, TINY, Plan, make_batch, make_batches, make_model, on_blocks_of
from benchmarks.gpu_drafts import NUM_TOKENS, DraftTiming, compare_drafts
from tandem.draft_law import draw_sparse
from tandem.engine import device_rejection
from tandem.engine.cuda_graphs import CudaGraphs
from tandem.engine.model_check import attention_of
from tandem.engine.rejection import verify
from tandem.engine.sampling import law, top_law
from tandem.engine.static_context import bucket_of
from tandem.engine.static_decode import Capture, Step, as_it_is
from tandem.engine.torch_runner import TorchRunner
from tandem.errors import TandemError
from tandem.randomness import Purpose, uniform
from tandem.types import SamplingParams

_MOST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}  # of logits, relative, as a norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One kind of batch: medians, in milliseconds. None: the batch is not one that is recorded."""

    name: str
    eager_ms: float
    recorded_ms: float | None
    floor_ms: float


@dataclass(slots=True, kw_only=True)
class Report:
    device: str
    versions: dict[str, str]
    dtype: str
    weight_bytes: int
    bandwidth: float  # bytes per second, read and written
    problems: list[str] = field(default_factory=list)
    logit_differences: dict[str, float] = field(default_factory=dict)
    rounds_alike: str = ""
    accept_ms: float = 0.0  # law, acceptance and the copy back, for five drafted tokens
    timings: list[Timing] = field(default_factory=list)
    drafts: list[DraftTiming] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; nothing was checked")
        return 0
    try:
        report = check(torch.device(options.device), model_source=options.model)
    except TandemError as error:
        print(f"gpu-check: {error.message}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    _show(report, Console(width=None if sys.stdout.isatty() else 120))
    return 1 if report.problems else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model", metavar="PATH", help="a folder, hub id or .gguf (default: random weights, 1.2 billion)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args(arguments)


@torch.inference_mode()
def check(device: torch.device, *, model_source: str | None = None) -> Report:
    """Everything, in order; `problems` of the report says what was wrong."""
    plan = TINY if device.type == "cpu" else FULL
    model, vocab_size = make_model(plan, device, model_source)
    num_blocks = (
        max(plan.batches) * (-(-(plan.contexts[0] + 32) // BLOCK_SIZE) + 1) + 2 * max(plan.contexts) // BLOCK_SIZE
    )
    own_attention, problems = attention_of(model), list[str]()
    eager = TorchRunner(model, vocab_size=vocab_size, block_size=BLOCK_SIZE, num_blocks=num_blocks)
    capture: Capture = as_it_is if device.type == "cpu" else CudaGraphs(next(model.parameters()).device)

    def noted(step: Step) -> Step:
        """A runner would go on without; here that is what one wants to know."""
        try:
            return capture(step)
        except RuntimeError as error:
            problems.append(f"a step cannot be recorded: {error}")
            raise

    model.set_attn_implementation(own_attention)  # the second runner compares itself with it, as the first did
    recorded = TorchRunner(model, vocab_size=vocab_size, block_size=BLOCK_SIZE, num_blocks=num_blocks, capture=noted)
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embeddings.data_ptr() != head.data_ptr():
        weights.pop(embeddings.data_ptr())  # a row for each token is read of it, not all
    report = Report(
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        versions={
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "transformers": transformers.__version__,
        },
        dtype=str(model.dtype).removeprefix("torch."),
        weight_bytes=sum(weights.values()),
        bandwidth=_bandwidth(plan, device),
        problems=problems,
    )
    _compare_logits(eager, recorded, plan, report, most=_MOST_DIFFERENCE[model.dtype])
    _compare_rules(vocab_size, plan, device, report)
    drafts = compare_drafts(
        eager,
        recorded,
        plan,
        most_difference=_MOST_DIFFERENCE[model.dtype],
        milliseconds=lambda work: 1e3 * _median_seconds(work, device, repeats=plan.repeats),
    )
    report.logit_differences["behind drafts"] = drafts.largest_difference
    report.problems += drafts.problems
    report.drafts = drafts.timings
    for name, batch in make_batches(plan, eager):
        seconds = _median_seconds(partial(eager.forward, batch), device, repeats=plan.repeats)
        faster = None
        if bucket_of(batch) is not None:
            faster = _median_seconds(partial(recorded.forward, batch), device, repeats=plan.repeats)
        report.timings.append(
            Timing(
                name=name,
                eager_ms=1e3 * seconds,
                recorded_ms=None if faster is None else 1e3 * faster,
                floor_ms=1e3 * report.weight_bytes / report.bandwidth,
            )
        )
    return report


def _compare_logits(eager: TorchRunner, recorded: TorchRunner, plan: Plan, report: Report, *, most: float) -> None:
    """A prompt in both caches, then blocks behind it; each bucket twice, so that its record answers for other data."""
    context = plan.contexts[0]
    prompts = [(0, context), (0, context // 2), (0, context - 7)]
    for seed, new in enumerate(((1, 1, 1), (5, 1, 3), (1, 1, 1), (2, 4, 5))):
        table = make_batch([(length, 5) for _, length in prompts], eager.vocab_size, seed=seed)
        logits = []
        for runner in (eager, recorded):
            runner.forward(on_blocks_of(table, make_batch(prompts, eager.vocab_size, seed=seed)))
            after = make_batch(
                [(length, n) for (_, length), n in zip(prompts, new, strict=True)], eager.vocab_size, seed=9
            )
            logits.append(runner.forward(on_blocks_of(table, after)).clone())
        difference = float((logits[1] - logits[0]).norm() / logits[0].norm())
        report.logit_differences[f"{new} after {context}, {seed}"] = difference
        if not difference <= most:
            report.problems.append(f"recorded logits of {new} new tokens differ from eager ones by {difference:.2%}")


def _compare_rules(vocab_size: int, plan: Plan, device: torch.device, report: Report) -> None:
    """Rounds of five tokens, drafted from a law that is near the target's: outcomes on the device and on the CPU."""
    kinds = (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(top_k=50))
    alike, seconds = 0, []
    for seed in range(plan.rounds):
        params, rng = kinds[seed % len(kinds)], np.random.default_rng(seed)
        logits = torch.from_numpy(rng.normal(0, 3, (6, vocab_size)).astype(np.float32))
        near = logits[:5] + torch.from_numpy(rng.normal(0, 0.5, (5, vocab_size)).astype(np.float32))
        laws = [top_law(probs, 50) for probs in law(near, params)]
        drafted = [draw_sparse(one, uniform(seed, i, Purpose.DRAFT)) for i, one in enumerate(laws)]
        expected = verify(logits, drafted, laws, params, seed=seed, position=0)
        there = logits.to(device)
        accepts = [uniform(seed, i, Purpose.ACCEPT) for i in range(5)]
        targets = [uniform(seed, i, Purpose.TARGET) for i in range(6)]
        _finish(device)
        began = time.perf_counter()
        outcome = device_rejection.accept(
            law(there, params), drafted, laws, accept_uniforms=accepts, target_uniforms=targets
        )
        seconds.append(time.perf_counter() - began)
        greedy = SamplingParams(temperature=0.0)
        same_choice = verify(there, drafted, None, greedy, seed=0, position=0) == verify(
            logits, drafted, None, greedy, seed=0, position=0
        )
        alike += outcome == (expected.num_accepted, expected.token_id) and same_choice
    report.rounds_alike = f"{alike} of {plan.rounds}"
    report.accept_ms = 1e3 * statistics.median(seconds)
    # Softmax rounds differently there; a number within 1e-6 of a border may then fall on its other side.
    if alike < plan.rounds - 1:
        report.problems.append(f"the rejection rule decides otherwise than on the CPU: alike in {report.rounds_alike}")


def _bandwidth(plan: Plan, device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.zeros(plan.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * plan.copy_bytes / _median_seconds(lambda: target.copy_(source), device, repeats=plan.repeats)


def _median_seconds(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """After three runs that do not count: the first records a step."""
    seconds = []
    for _ in range(repeats + 3):
        _finish(device)
        began = time.perf_counter()
        work()
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _show(report: Report, console: Console) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"{report.device}, {report.dtype}, {versions}")
    console.print(f"weights {report.weight_bytes / 1e9:.3g} GB; a copy moves {report.bandwidth / 1e9:.0f} GB/s")
    differences = max(report.logit_differences.values())
    console.print(
        f"recorded and eager logits differ by {differences:.2%} at most; rules alike in {report.rounds_alike}"
    )
    console.print(f"law and acceptance of five drafted tokens: {report.accept_ms:.2f} ms")
    table = Table("new tokens at context", "eager ms", "recorded ms", "eager / recorded", "floor ms", "times the floor")
    for timing in report.timings:
        best = timing.eager_ms if timing.recorded_ms is None else timing.recorded_ms
        table.add_row(
            timing.name,
            f"{timing.eager_ms:.2f}",
            "" if timing.recorded_ms is None else f"{timing.recorded_ms:.2f}",
            "" if timing.recorded_ms is None else f"{timing.eager_ms / timing.recorded_ms:.1f}",
            f"{timing.floor_ms:.2f}",
            f"{best / timing.floor_ms:.1f}",
        )
    console.print(table)
    table = Table(f"texts, drafts of {NUM_TOKENS}", "eager ms", "recorded ms", "one step ms", "recorded / one step")
    for draft in report.drafts:
        table.add_row(
            str(draft.num_texts),
            f"{draft.eager_ms:.2f}",
            f"{draft.recorded_ms:.2f}",
            "" if draft.gone_on_ms is None else f"{draft.gone_on_ms:.2f}",
            "" if draft.gone_on_ms is None else f"{draft.recorded_ms / draft.gone_on_ms:.1f}",
        )
    console.print(table)
    for problem in report.problems:
        console.print(f"[bold red]wrong:[/] {problem}")


if __name__ == "__main__":
    sys.exit(main())
