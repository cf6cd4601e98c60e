"""A target with a draft head, over real sockets: the text is plain decoding's, whatever the head says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from tandem.models.tokenizer_files import tokenizer_fingerprint
from tests.stack import Stack
from tests.toy_heads import random_head

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


def _head(target_folder: Path, file: Path, *, width: int | None = None) -> Path:
    """Random, for letters and spaces."""
    if width is None:
        with safe_open(target_folder / "model.safetensors", framework="numpy") as opened:
            width = opened.get_tensor("model.embed_tokens.weight").shape[1]
    head = random_head(
        width=width,
        token_ids=tuple(range(32, 127)),
        fingerprint=tokenizer_fingerprint(target_folder),
        sharpness=4.0,
    )
    head.save(file)
    return file


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("with-head")
    settings = {"TANDEM_TARGET_DRAFT_HEAD": str(_head(target_folder, folder / "head.safetensors"))}
    with Stack(folder=folder, target_model=str(target_folder), num_drafts=0, settings=settings) as running:
        yield running


@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 0.7, "seed": 4}])
def test_the_text_is_plain_decoding_s(with_head: Stack, law: dict[str, float]) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True, **law}
    plain = with_head.complete(**asked, speculation={"enabled": False})
    spoken = with_head.complete(**asked, speculation={"num_draft_tokens": 3})
    assert spoken["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert spoken["speculation"]["drafted"] > 0


def test_what_it_says_is_drafted_where_the_text_itself_says_nothing(with_head: Stack) -> None:
    """Under the rejection rule, with the law that the head gave."""
    asked = {"prompt": "a", "max_tokens": 3, "temperature": 1, "ignore_eos": True}
    report = with_head.complete(**asked, speculation={"num_draft_tokens": 1, "verification": "rejection"})[
        "speculation"
    ]
    assert report["drafted"] == 1
    assert report["bytes_sent"] > 4 + 2 * 4 * 30  # an id, and a law of some 32


@pytest.mark.parametrize(
    ("width", "says"), [(7, "the draft head reads states of 7 numbers"), (None, "cannot be read as a draft head")]
)
def test_a_head_that_does_not_go_with_the_target_ends_the_start(
    tmp_path: Path, target_folder: Path, width: int | None, says: str
) -> None:
    file = tmp_path / "head"
    if width is None:
        file.write_bytes(b"no head")
    else:
        _head(target_folder, file, width=width)
    settings = {"TANDEM_TARGET_DRAFT_HEAD": str(file)}
    stack = Stack(folder=tmp_path, target_model=str(target_folder), num_drafts=0, settings=settings)
    target = stack.targets[0]
    target.start()
    assert target.process is not None
    assert target.process.wait(60) != 0
    assert says in target.log.read_text()
