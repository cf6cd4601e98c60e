"""A draft head that is trained: what it begins as, what it learns, what is written; and the stage around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.distill.dataset import Example
from tandem.distill.head import HeadNetwork, HeadSettings, token_rows
from tandem.distill.head_run import HeadStage, first_answers, write_head
from tandem.distill.head_training import HeadAcceptance, HeadData, train_head
from tandem.distill.optimizing import TrainingReport
from tandem.distill.work_folder import Answer, WorkFolder
from tandem.draft_head import DraftHeadWeights, HeadOrigin
from tandem.engine.draft_head import TorchDraftHead
from tandem.errors import InvalidRequest, Unavailable
from tandem.models.locate import ModelFiles
from tandem.models.tokenizer_files import tokenizer_fingerprint
from tandem.settings import EngineSettings
from tests.distill_examples import TOP, asked, example
from tests.tiny_models import write_target

WIDTH: Final = 16
KINDS: Final = 4
NUM_IDS: Final = 12
IDS: Final = np.arange(NUM_IDS, dtype=np.int64)
CPU: Final = torch.device("cpu")
SETTINGS: Final = HeadSettings(
    vocabulary=NUM_IDS, token_width=8, inner=32, epochs=25.0, batch_rows=128, learning_rate=5e-3, evaluations=4
)
ORIGIN: Final = HeadOrigin(
    model_id="tiny", tokenizer_fingerprint="x", num_answer_tokens=1, greedy_acceptance=0.0, sampled_acceptance=0.0
)


def toy_answers(count: int = 100) -> tuple[list[Example], npt.NDArray[np.float16]]:
    """Each state is near that of its kind. A token is the sum of kind and token before, with 0.8 of the mass."""
    rng = np.random.default_rng(0)
    columns = rng.uniform(0.2, 3.0, WIDTH)
    kinds_states = rng.normal(size=(KINDS, WIDTH)) * columns
    examples, states = [], []
    for index in range(count):
        kinds = rng.integers(0, KINDS, 20)
        tokens = [0, int(rng.integers(0, NUM_IDS))]
        for kind in kinds[:-1]:
            tokens.append((tokens[-1] + int(kind)) % NUM_IDS)
        laws = np.full((20, NUM_IDS), 0.2 / (NUM_IDS - 1), dtype=np.float32)
        laws[np.arange(20), tokens[1:]] = 0.8
        examples.append(example(tokens, 1, laws, validation=index % 5 == 0, temperature=float(index % 2)))
        states.append(kinds_states[kinds] + 0.1 * rng.normal(size=(20, WIDTH)) * columns)
    return examples, np.concatenate(states).astype(np.float16)


def toy_data(ids: npt.NDArray[np.int64] = IDS) -> HeadData:
    examples, states = toy_answers()
    return HeadData(examples, states, ids, device=CPU)


def toy_network(data: HeadData, *, seed: int = 0) -> HeadNetwork:
    generator = torch.Generator().manual_seed(1)
    count = len(data.vocabulary)
    return HeadNetwork(
        tokens=token_rows(torch.randn(count, WIDTH, generator=generator), SETTINGS.token_width),
        out=0.3 * torch.randn(count, WIDTH, generator=generator),
        column_sizes=data.column_sizes(),
        inner=SETTINGS.inner,
        seed=seed,
    )


def of_network(network: HeadNetwork, data: HeadData) -> HeadAcceptance:
    return data.acceptance(lambda batch: network(batch.states, batch.places) @ network.out.T)


def train(
    network: HeadNetwork, data: HeadData, *, reports: list[TrainingReport] | None = None, most_steps: int = 10**6
) -> tuple[bool, list[HeadAcceptance]]:
    found: list[HeadAcceptance] = []
    seen: list[TrainingReport] = [] if reports is None else reports
    done = train_head(
        network,
        data,
        SETTINGS,
        bfloat16=False,
        advance=seen.append,
        evaluated=found.append,
        stop=lambda: len(seen) >= most_steps,
    )
    return done, found


def test_token_rows_are_principal_components_of_unit_size() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(200, 10, generator=generator) * torch.tensor([5.0, 3.0, 2.0, *[0.1] * 7]) + 7.0
    rows = token_rows(embeddings, 3)
    assert rows.shape == (200, 3)
    assert float(rows.square().mean()) == pytest.approx(1.0, rel=1e-4)
    torch.testing.assert_close(rows.mean(dim=0), torch.zeros(3), atol=1e-4, rtol=0.0)
    # Nearly all distances are kept, up to one factor.
    ours, theirs = torch.cdist(rows[:50], rows[:50]), torch.cdist(embeddings[:50], embeddings[:50])
    assert float(torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1]) > 0.999
    wider = token_rows(embeddings, 16)
    assert wider.shape == (200, 16)
    assert not bool(wider[:, 10:].any())


def test_it_begins_as_the_target_s_own_head() -> None:
    data = toy_data()
    network = toy_network(data)
    with torch.no_grad():
        network.from_token.weight.zero_()
        network.down.weight.zero_()
        batch = data.batch(data.training[:50])
        begun = network(batch.states, batch.places)
    torch.testing.assert_close(torch.cosine_similarity(begun, batch.states), torch.ones(50), atol=1e-4, rtol=0.0)
    assert float(begun.norm() / batch.states.norm()) == pytest.approx(1.0, abs=0.15)
    # A token that it does not know says nothing.
    assert float(network.tokens[-1].detach().abs().max()) < 1e-5
    assert torch.equal(toy_network(data, seed=3).gate.weight, toy_network(data, seed=3).gate.weight)
    assert not torch.equal(toy_network(data, seed=3).gate.weight, network.gate.weight)


def test_a_row_is_a_token_its_state_and_the_law_of_the_token_behind_it() -> None:
    laws = np.zeros((4, 12), dtype=np.float32)
    laws[:] = 0.01
    laws[[0, 1, 2, 3], [5, 6, 7, 8]] = 0.89
    first, second = example([1, 2, 5, 6, 7, 8], 2, laws), example([1, 3, 4], 2)
    held = example([1, 2, 5, 6, 7, 8], 2, laws, validation=True)
    states = np.arange(9 * WIDTH, dtype=np.float16).reshape(9, WIDTH)
    data = HeadData([first, second, held], states, np.array([5, 6, 8]), device=CPU)
    assert data.training.tolist() == [0, 1, 2]
    batch = data.batch(data.training)
    assert batch.states.tolist() == states[:3].tolist()
    assert batch.token_ids.tolist() == [5, 6, 7]
    assert batch.next_ids.tolist() == [6, 7, 8]
    assert batch.places.tolist() == [0, 1, 3]  # the last: a token that it lacks
    # The likeliest of each law are 6, 7 and 8; 7 is none of its tokens.
    assert batch.target_ids[[0, 2], 0].tolist() == [1, 2]
    np.testing.assert_allclose(batch.target_probs[:, 0], [0.89, 0.0, 0.89], atol=2e-3)
    expected = np.sqrt(np.square(states[:3].astype(np.float64)).mean(axis=0))
    np.testing.assert_allclose(data.column_sizes().numpy(), expected, rtol=1e-5)


def test_it_learns_what_state_and_token_tell_together() -> None:
    data = toy_data()
    network = toy_network(data)
    before = of_network(network, data)
    reports: list[TrainingReport] = []
    done, found = train(network, data, reports=reports)
    assert done
    assert [report.step for report in reports] == list(range(1, reports[-1].steps + 1))
    assert reports[-1].loss < 0.3 * reports[0].loss
    assert len(found) == SETTINGS.evaluations
    after = of_network(network, data)
    assert after == max(found, key=lambda one: one.score)  # the best weights are kept
    assert before.greedy < 0.4
    assert after.greedy > 0.9
    assert after.sampled > max(0.6, before.sampled)


def test_the_same_seed_trains_the_same_head() -> None:
    data = toy_data()
    first, second = toy_network(data), toy_network(data)
    assert train(first, data)[1] == train(second, data)[1]
    assert torch.equal(first.gate.weight, second.gate.weight)


def test_it_ends_when_told_to() -> None:
    data = toy_data()
    reports: list[TrainingReport] = []
    done, _ = train(toy_network(data), data, reports=reports, most_steps=5)
    assert not done
    assert len(reports) == 5


@pytest.mark.parametrize("ids", [IDS, np.arange(3, NUM_IDS, dtype=np.int64)], ids=["all", "some"])
def test_what_is_written_says_nearly_what_was_trained(ids: npt.NDArray[np.int64], tmp_path: Path) -> None:
    data = toy_data(ids)
    network = toy_network(data)
    train(network, data)
    path = tmp_path / "new" / "head.safetensors"
    write_head(network.rounded(ids, ORIGIN), path)
    written = TorchDraftHead(DraftHeadWeights.load(path), device=CPU)
    batch = data.batch(data.training[:300])
    with torch.no_grad():
        expected = (network(batch.states, batch.places) @ network.out.T).softmax(-1)
        found = written.logits(batch.states, batch.token_ids.tolist()).softmax(-1)
    assert float((expected - found).abs().sum(-1).mean() / 2) < 0.02
    of_written = data.acceptance(lambda batch: written.logits(batch.states, batch.token_ids.tolist()))
    assert of_written.sampled == pytest.approx(of_network(network, data).sampled, abs=0.02)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_it_cannot_do_it_says(tmp_path: Path) -> None:
    alone = [example([1, 2], 1), example([1, 3], 1, validation=True)]
    with pytest.raises(InvalidRequest, match="of one token each"):
        HeadData(alone, np.zeros((2, WIDTH), dtype=np.float16), IDS, device=CPU)
    data = toy_data()
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="give another --head"):
        write_head(toy_network(data).rounded(IDS, ORIGIN), tmp_path / "file" / "head.safetensors")


class Lines:
    """A Display that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stages: set[str] = set()

    def say(self, line: str) -> None:
        self.said.append(line)

    def progress(self, stage: str, *, completed: float, total: float, words: str) -> None:
        self.stages.add(stage)


def answers_of(examples: Sequence[Example], *, first: int) -> list[Answer]:
    return [
        Answer(
            asked=asked(first + index, validation=index % 4 == 0),
            text="",
            prompt_ids=one.token_ids[: one.prompt_length],
            answer_ids=one.token_ids[one.prompt_length :],
            top_ids=one.top_ids,
            top_log_probs=one.top_log_probs,
        )
        for index, one in enumerate(examples)
    ]


@pytest.fixture
def stage(tmp_path: Path) -> HeadStage:
    files = ModelFiles(folder=write_target(tmp_path / "target"), model_id="tiny", revision="")
    folder = WorkFolder(tmp_path / "work")
    folder.claim({"model": "tiny", "top": TOP})
    for shard in range(2):
        counting = [example([(start + 7 * shard + i) % 40 for i in range(30)], 10) for start in range(12)]
        folder.add(answers_of(counting, first=12 * shard), counts={})
    return HeadStage(
        files=files,
        folder=folder,
        path=tmp_path / "out" / "head.safetensors",
        settings=HeadSettings(vocabulary=100, inner=16, epochs=20.0, batch_rows=64),
        engine=EngineSettings(dtype="float32", kv_cache_bytes=1 << 22, device="cpu", threads=1),
    )


def test_the_stage_makes_a_head_for_the_target_once(stage: HeadStage) -> None:
    first = Lines()
    head = stage.run(first, lambda: False)
    assert head is not None
    assert first.stages == {"states", "head"}
    written = DraftHeadWeights.load(stage.path)
    assert written.origin == head.origin
    assert head.origin.model_id == "tiny"
    assert head.origin.tokenizer_fingerprint == tokenizer_fingerprint(stage.files.folder)
    assert head.origin.greedy_acceptance > 0.5
    assert head.origin.sampled_acceptance == 0.0  # no such answers
    assert (head.state_width, len(head.token_ids), head.tokens.shape) == (64, 100, (101, 128))

    again = Lines()
    same = stage.run(again, lambda: False)
    assert same is not None
    assert same.origin == head.origin
    assert not again.said
    assert not again.stages

    # Other settings, or another file in its place: another head, of the same states.
    other = Lines()
    assert replace(stage, settings=replace(stage.settings, inner=8)).run(other, lambda: False) is not None
    assert other.stages == {"head"}
    stage.path.write_bytes(b"broken")
    assert stage.run(Lines(), lambda: False) is not None
    assert DraftHeadWeights.load(stage.path).gate.shape[0] == 16


def test_the_stage_ends_when_told_to(stage: HeadStage) -> None:
    assert stage.run(Lines(), lambda: True) is None
    assert not stage.path.exists()


def test_the_first_answers_are_those_of_whole_shards(stage: HeadStage) -> None:
    shards = stage.folder.shards
    taken, examples = first_answers(shards, most_tokens=1)
    assert taken == shards[:1]
    assert len(examples) == 12
    taken, examples = first_answers(shards, most_tokens=10**6)
    assert taken == shards
    assert len(examples) == 24
