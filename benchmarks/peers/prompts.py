"""The prompts: first turns of Spec-Bench, rendered and turned into ids once, for all peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.peer import Model, Prompt
from gateway.tokenizer import Tokenizer
from tandem.bench.plan import tickets, with_ticket
from tandem.bench.workload import load_workload
from tandem.models.bundled import default_cache_dir, fetch_bundled
from tandem.models.locate import locate
from tandem.models.openvino_files import openvino_model
from tandem.models.tokenizer_files import tokenizer_files

WORKLOAD = Path(__file__).parents[1] / "data" / "spec_bench.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """`tuning`, one of each category, choose the settings; they are not among the `measured`."""

    tuning: tuple[Prompt, ...]
    measured: tuple[Prompt, ...]


def bundled_model(progress: Callable[[str], None]) -> Model:
    """The bundled model's file, and the folder made from it; fetched and made where they are not there yet."""
    cache = default_cache_dir()
    gguf = fetch_bundled(cache, progress)
    files = locate(str(gguf), cache_dir=cache, progress=progress)
    openvino_model(files, progress)  # written beside the rest, for OpenVINO GenAI to read
    ends = Tokenizer.from_files(tokenizer_files(files.folder)).special_token_ids["eos_token"]
    return Model(gguf=gguf, folder=files.folder, end_token_ids=(ends,))


def prepare(tokenizer: Tokenizer, *, per_category: int, categories: Sequence[str] = ()) -> Prompts:
    """`per_category` prompts of each category, in turn, and one more of each for tuning.

    Each begins with a line of its own, as in `tandem bench`: no peer can have read it before.
    """
    workload = load_workload(WORKLOAD).first_turns(1).per_category(per_category + 1)
    chosen = [name for name in workload.categories if not categories or name in categories]
    numbers = tickets(time.time_ns() % 1_000_000_000)
    rows: list[list[Prompt]] = []
    for category in chosen:
        row = []
        for prompt in (prompt for prompt in workload.prompts if prompt.category == category):
            messages = [*prompt.opening, {"role": "user", "content": prompt.turns[0]}]
            text = tokenizer.render_chat(with_ticket(messages, next(numbers)), add_generation_prompt=True)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            row.append(Prompt(question_id=prompt.name, category=category, text=text, token_ids=token_ids))
        rows.append(row)
    # In turn over the categories: a run that is cut short has some of each.
    in_turn = [row[i] for i in range(per_category) for row in rows]
    return Prompts(tuning=tuple(row[-1] for row in rows), measured=tuple(in_turn))
