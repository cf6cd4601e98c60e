"""The parts of training: batches, the draft's vocabulary, the loss, acceptance, the student's layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.distill.dataset import batches, coverage, likeliest_ids, read_examples, split
from tandem.distill.evaluation import acceptance
from tandem.distill.loss import law_loss
from tandem.distill.student import Student, new_student, spread_layers
from tandem.distill.training import TrainingSettings, run_name, train
from tandem.distill.work_folder import Answer, WorkFolder
from tandem.errors import InvalidRequest
from tandem.models.loading import load_model
from tandem.models.locate import ModelFiles
from tests.distill_examples import TOP, VOCAB, asked, example, random_examples
from tests.tiny_models import write_target


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("training") / "target", layers=4)


def student(target_folder: Path, layers: Sequence[int] = (0, 3), *, kept: int = VOCAB) -> Student:
    files = ModelFiles(folder=target_folder, model_id="tiny", revision="")
    target = load_model(files, device="cpu", dtype="float32").model
    return Student(new_student(target, layers, device=torch.device("cpu")), np.arange(kept), bfloat16=False)


def test_a_student_of_all_layers_is_the_target(target_folder: Path) -> None:
    files = ModelFiles(folder=target_folder, model_id="tiny", revision="")
    target = load_model(files, device="cpu", dtype="float32").model
    one = student(target_folder, range(4))
    batch = one.batch([example([1, 2, 3, 4, 5, 6], 2)])
    with torch.no_grad():
        expected = target(input_ids=batch.token_ids).logits[0, 1:5]
        torch.testing.assert_close(one.hidden(batch) @ one.head.T, expected)


def test_a_student_begins_with_the_layers_that_were_chosen(target_folder: Path) -> None:
    files = ModelFiles(folder=target_folder, model_id="tiny", revision="")
    target = load_model(files, device="cpu", dtype="float32").model
    weights, own = target.state_dict(), student(target_folder, (0, 3)).model.state_dict()
    name = "model.layers.{}.mlp.down_proj.weight"
    assert torch.equal(own[name.format(1)], weights[name.format(3)])
    assert name.format(2) not in own
    assert spread_layers(3, 30) == (0, 1, 29)
    assert spread_layers(1, 30) == (29,)
    with pytest.raises(InvalidRequest, match="between 1 and the target's 30 layers"):
        spread_layers(31, 30)


def test_embeddings_and_head_are_not_trained(target_folder: Path) -> None:
    names = student(target_folder).parameters()
    assert "model.norm.weight" in names
    assert not [name for name in names if "embed" in name or "lm_head" in name]


def test_what_shares_a_batch_does_not_see_each_other(target_folder: Path) -> None:
    one = student(target_folder)
    group = random_examples(5)
    with torch.no_grad():
        together = one.hidden(one.batch(group))
        alone = torch.cat([one.hidden(one.batch([each])) for each in group])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_batches_hold_every_example_once_within_the_bound() -> None:
    group = random_examples(200)
    made = list(batches(group, most_tokens=256, rng=np.random.default_rng(0)))
    assert sorted(id(each) for batch in made for each in batch) == sorted(map(id, group))
    assert all(len(batch) * max(map(len, batch)) <= 256 for batch in made)
    again = list(batches(group, most_tokens=256, rng=np.random.default_rng(0)))
    assert [[id(e) for e in batch] for batch in made] == [[id(e) for e in batch] for batch in again]


def test_the_vocabulary_is_what_has_most_mass_and_what_must_be_there() -> None:
    laws = np.zeros((2, VOCAB), dtype=np.float32)
    laws[:, :TOP] = [[0.1, 0.2, 0.3, 0.15, 0.05, 0.1, 0.06, 0.04], [0.1, 0.1, 0.4, 0.25, 0.05, 0.05, 0.03, 0.02]]
    one = example([9, 2, 3], 1, laws)
    assert likeliest_ids([one], count=3, always=frozenset()).tolist() == [1, 2, 3]
    assert likeliest_ids([one], count=3, always=frozenset({200})).tolist() == [2, 3, 200]
    assert likeliest_ids([one], count=500, always=frozenset()).tolist() == list(range(TOP))
    assert coverage([one], np.array([2])) == 0.5


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
def test_the_loss_and_its_gradient_are_those_of_the_plain_formula(overlap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, width, vocab = 700, 16, 50  # more rows than go at once
    head = torch.randn(vocab, width, generator=generator)
    target = torch.randn(rows, vocab, generator=generator).mul(2.0).softmax(-1)
    probs, ids = target.topk(TOP)
    probs[::3, -2:] = 0.0  # tokens that the draft's vocabulary lacks

    def plain(hidden: torch.Tensor) -> torch.Tensor:
        law = (hidden @ head.T).softmax(-1).gather(1, ids)
        divergence = (torch.xlogy(probs, probs) - torch.xlogy(probs, law)).sum(-1)
        lost = (probs - torch.minimum(probs, law)).sum(-1)
        return ((1.0 - overlap) * divergence + overlap * lost).mean()

    ours = torch.randn(rows, width, generator=generator).requires_grad_()
    reference = ours.detach().clone().requires_grad_()
    loss, expected = law_loss(ours, head, ids, probs, overlap=overlap), plain(reference)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    expected.backward()
    assert ours.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-3, atol=1e-6)


def test_acceptance_is_counted_by_hand(target_folder: Path) -> None:
    """The target's law is the student's own, but for answer tokens 1 and 4, whose likeliest is made another."""
    one = student(target_folder, range(4))
    tokens = [1, 2]
    with torch.no_grad():
        for _ in range(5):
            laws = (one.hidden(one.batch([example([*tokens, 0], 1)])) @ one.head.T).softmax(-1).numpy()
            ordered = np.argsort(-laws[-1])
            tokens.append(int(ordered[1 if len(tokens) - 2 in (1, 4) else 0]))
        laws = (one.hidden(one.batch([example(tokens, 2)])) @ one.head.T).softmax(-1).numpy()
    changed = laws.copy()
    for row in (1, 4):  # so the draft is right, wrong, right, right, wrong
        changed[row, tokens[2 + row]] = 0.9
        changed[row] /= changed[row].sum()
    greedy = example(tokens, 2, changed, category="kind")
    sampled = example(tokens, 2, changed, temperature=1.0)
    found = acceptance(one, [greedy, sampled])
    assert found.greedy == {"all": 0.6, "kind": 0.6}
    # Drafted first: 3 of 5. After one that was right (places 1, 3, 4): only place 3 is right.
    assert found.by_depth[:3] == (0.6, 1 / 3, 0.0)
    assert found.num_greedy_tokens == found.num_sampled_tokens == 5
    top = np.argsort(-changed, axis=-1)[:, :TOP]
    expected = np.minimum(np.take_along_axis(changed, top, -1), np.take_along_axis(laws, top, -1)).sum(-1).mean()
    assert found.sampled["all"] == pytest.approx(float(expected), abs=2e-3)


def settings(**changes: object) -> TrainingSettings:
    values: dict[str, object] = {
        "layers": (0, 3),
        "vocabulary": VOCAB,
        "epochs": 6.0,
        "batch_tokens": 256,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "overlap": 0.0,
        "evaluations": 3,
        "patience": 3,
        "seed": 0,
    }
    return TrainingSettings(**{**values, **changes})  # type: ignore[arg-type]


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(target_folder: Path, tmp_path: Path) -> None:
    group = random_examples(40)
    checked = [example(each.token_ids.tolist(), each.prompt_length, validation=True) for each in group[:8]]
    losses: dict[str, list[float]] = {"whole": [], "parts": []}
    resumed: list[int] = []

    def go(name: str, *, most_steps: int) -> tuple[bool, Student]:
        one = student(target_folder)
        steps = 0

        def advance(report: object) -> None:
            nonlocal steps
            steps += 1

        done = train(
            one,
            group,
            checked,
            settings(),
            tmp_path / name,
            advance=advance,
            evaluated=lambda found: losses[name].append(found.greedy["all"]),
            resumed=resumed.append,
            stop=lambda: steps >= most_steps,
        )
        return done, one

    done, whole = go("whole", most_steps=10**6)
    assert done
    assert not resumed
    parts = 0
    done = False
    while not done:
        done, student_of_parts = go("parts", most_steps=7)
        parts += 1
    assert parts > 2
    assert resumed == [7 * part for part in range(1, parts)]
    assert losses["parts"] == losses["whole"]
    for name, value in whole.parameters().items():
        torch.testing.assert_close(student_of_parts.parameters()[name], value, msg=name)


def test_training_learns_what_it_is_shown(target_folder: Path, tmp_path: Path) -> None:
    group = random_examples(30)
    one = student(target_folder)
    before = acceptance(one, group).greedy["all"]
    train(
        one,
        group,
        group,
        settings(epochs=40.0, patience=50),
        tmp_path / "run",
        advance=lambda _: None,
        evaluated=lambda _: None,
        resumed=lambda _: None,
        stop=lambda: False,
    )
    assert acceptance(one, group).greedy["all"] > before + 0.3


def test_a_run_is_named_by_its_settings_and_its_shards(tmp_path: Path) -> None:
    shards = [tmp_path / "shard-00000.safetensors"]
    name = run_name(settings(), shards)
    assert name == run_name(settings(), shards)
    assert len({name, run_name(settings(epochs=7.0), shards), run_name(settings(), shards * 2)}) == 3


def test_answers_come_back_from_the_work_folder_as_they_were(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    folder.claim({"model": "tiny", "top": TOP})
    rng = np.random.default_rng(0)
    answers = [
        Answer(
            asked=asked(index, validation=index == 2),
            text=f"text {index}",
            prompt_ids=rng.integers(0, 9, index + 1).astype(np.int32),
            answer_ids=rng.integers(0, 9, index + 2).astype(np.int32),
            top_ids=rng.integers(0, 9, (index + 2, TOP)).astype(np.int32),
            top_log_probs=rng.normal(size=(index + 2, TOP)).astype(np.float16),
        )
        for index in range(3)
    ]
    folder.add(answers[:2], counts={"answers": 2})
    folder.add(answers[2:], counts={"answers": 3})
    assert [(one.asked.key, one.text, one.num_tokens) for one in folder.said()] == [
        ("0", "text 0", 2),
        ("1", "text 1", 3),
        ("2", "text 2", 4),
    ]
    for found, answer in zip(read_examples(folder.shards), answers, strict=True):
        np.testing.assert_array_equal(found.token_ids[: found.prompt_length], answer.prompt_ids)
        np.testing.assert_array_equal(found.token_ids[found.prompt_length :], answer.answer_ids)
        np.testing.assert_array_equal(found.top_ids, answer.top_ids)
        np.testing.assert_array_equal(found.top_log_probs, answer.top_log_probs)
    training, validation = split(read_examples(folder.shards))
    assert (len(training), len(validation)) == (2, 1)
    with pytest.raises(InvalidRequest, match="too few"):
        split(training)

    folder.claim({"model": "tiny", "top": TOP})
    with pytest.raises(InvalidRequest, match="its model is 'tiny', not 'other'"):
        folder.claim({"model": "other", "top": TOP})
    folder.shards[0].write_bytes(b"broken")
    with pytest.raises(InvalidRequest, match="is damaged"):
        list(folder.said())
