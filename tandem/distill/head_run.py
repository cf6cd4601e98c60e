"""The stage that makes a draft head: the target's states along its answers, the training, and the file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from tandem.distill.dataset import Example, coverage, likeliest_ids, read_examples, split
from tandem.distill.display import Display
from tandem.distill.head import HeadNetwork, HeadSettings, token_rows
from tandem.distill.head_training import HeadAcceptance, HeadData, train_head
from tandem.distill.optimizing import TrainingReport
from tandem.distill.states import States
from tandem.distill.work_folder import WorkFolder, write_whole
from tandem.draft_head import DraftHeadWeights, HeadOrigin
from tandem.engine.draft_head import TorchDraftHead
from tandem.engine.factory import start_runner
from tandem.errors import InvalidRequest, Unavailable
from tandem.models.facts import end_token_ids_of
from tandem.models.loading import choose_device, choose_dtype, load_model
from tandem.models.locate import ModelFiles
from tandem.models.tokenizer_files import tokenizer_fingerprint
from tandem.settings import EngineSettings

RECORD: Final = "head.json"  # which head was made last, so that it is not made again


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStage:
    """A head to be made for the target in `files`, of the answers in `folder`, as the file `path`."""

    files: ModelFiles
    folder: WorkFolder
    path: Path
    settings: HeadSettings
    engine: EngineSettings

    def run(self, display: Display, stop: Callable[[], bool]) -> DraftHeadWeights | None:
        """The head, which is in its file now; None where `stop` ended the work. Raises TandemError."""
        shards, examples = first_answers(self.folder.shards, most_tokens=self.settings.most_tokens)
        training, validation = split(examples)
        states = States(self.folder.path, shards, examples)
        name = hashlib.sha256(json.dumps([asdict(self.settings), states.identity], sort_keys=True).encode()).hexdigest()
        if (there := self._there(name)) is not None:
            return there
        if not self._states_are_there(states, display, stop):
            return None
        torch.set_num_threads(self.engine.threads)  # an OpenVINO runner has left one
        device = choose_device(self.engine.device)
        ids = likeliest_ids(training, count=self.settings.vocabulary, always=end_token_ids_of(self.files.folder))
        data = HeadData(examples, states.read(), ids, device=device)
        network = self._new_network(data, display).to(device)
        display.say(
            f"training a draft head on {len(data.training):,} states; its {len(ids):,} tokens are "
            f"{coverage(validation, ids):.1%} of the held-out answers"
        )

        def advance(report: TrainingReport) -> None:
            display.progress("head", completed=report.step, total=report.steps, words=report.words)

        if not train_head(
            network,
            data,
            self.settings,
            bfloat16=choose_dtype("auto", device) is torch.bfloat16,
            advance=advance,
            evaluated=lambda found: display.say(_in_words(found)),
            stop=stop,
        ):
            return None
        weights = self._rounded(network, data, num_answer_tokens=sum(len(example.top_ids) for example in training))
        write_head(weights, self.path)
        record = {"name": name, "sha256": _sha256(self.path)}
        write_whole(self.folder.path / RECORD, json.dumps(record).encode())
        return weights

    def _there(self, name: str) -> DraftHeadWeights | None:
        """What an earlier run has made of the same answers in the same way, if the file is still that."""
        try:
            record = json.loads((self.folder.path / RECORD).read_bytes())
            if record != {"name": name, "sha256": _sha256(self.path)}:
                return None
            return DraftHeadWeights.load(self.path)
        except (OSError, ValueError, InvalidRequest):
            return None

    def _states_are_there(self, states: States, display: Display, stop: Callable[[], bool]) -> bool:
        total = states.num_rows
        if states.num_done == total:
            return True
        display.say(f"the target reads its answers again, for its states at {total:,} tokens")
        runner = start_runner(self.files, self.engine, progress=display.say).runner

        def advance(done: int, rows_per_second: float) -> None:
            words = f"{done:,} of {total:,} states, {rows_per_second:,.0f} a second"
            display.progress("states", completed=done, total=total, words=words)

        return states.compute(runner, advance=advance, stop=stop)

    def _new_network(self, data: HeadData, display: Display) -> HeadNetwork:
        # Embeddings and head are all that is wanted of it.
        target: Any = load_model(self.files, device="cpu", dtype="float32", num_layers=1, progress=display.say).model
        ids = torch.from_numpy(data.vocabulary)
        embeddings, head = (
            module.weight.detach()[ids] for module in (target.get_input_embeddings(), target.get_output_embeddings())
        )
        return HeadNetwork(
            tokens=token_rows(embeddings, self.settings.token_width),
            out=head,
            column_sizes=data.column_sizes(),
            inner=self.settings.inner,
            seed=self.settings.seed,
        )

    def _rounded(self, network: HeadNetwork, data: HeadData, *, num_answer_tokens: int) -> DraftHeadWeights:
        """The head in 8 bits, and how often that is accepted."""
        origin = HeadOrigin(
            model_id=self.files.model_id,
            tokenizer_fingerprint=tokenizer_fingerprint(self.files.folder),
            num_answer_tokens=num_answer_tokens,
            greedy_acceptance=0.0,
            sampled_acceptance=0.0,
        )
        weights = network.rounded(data.vocabulary, origin)
        head = TorchDraftHead(weights, device=network.out.device)
        found = data.acceptance(lambda batch: head.logits(batch.states, batch.token_ids.tolist()))
        return replace(
            weights, origin=replace(origin, greedy_acceptance=found.greedy, sampled_acceptance=found.sampled)
        )


def first_answers(shards: Sequence[Path], *, most_tokens: int) -> tuple[list[Path], list[Example]]:
    """The first shards, until their answers have `most_tokens` together, and all answers in these."""
    taken: list[Path] = []
    examples: list[Example] = []
    num_tokens = 0
    for shard in shards:
        if num_tokens >= most_tokens:
            break
        found = read_examples([shard])
        taken.append(shard)
        examples += found
        num_tokens += sum(len(example.top_ids) for example in found)
    return taken, examples


def write_head(weights: DraftHeadWeights, path: Path) -> None:
    """Write the file whole or not at all. Raises Unavailable where it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        weights.save(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise Unavailable(f"cannot write the draft head to {path}: {error}; give another --head") from error


def _in_words(found: HeadAcceptance) -> str:
    return f"acceptance {found.greedy:.3f} at temperature 0, {found.sampled:.3f} at 1"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
