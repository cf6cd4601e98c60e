"""The incremental detokeniser against the library's decode of all ids at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from gateway.detokenize import TokenTable, read_recipe
from tests.fakes import BOS, END, library_tokenizer

SPACE = "▁"
BYTE_LEVEL = library_tokenizer()


def sentencepiece(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """Llama's kind: ▁ for a space, and a token for every byte."""
    pieces = ["<unk>", "<s>", SPACE, *"abcdé", SPACE + "a", SPACE + "b", SPACE * 2, "ab", "."]
    vocab = {piece: index for index, piece in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoder
    return tokenizer


LLAMA = sentencepiece(
    decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
)
GEMMA = sentencepiece(decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]))
METASPACE = sentencepiece(decoders.Metaspace())
METASPACE_NEVER = sentencepiece(decoders.Metaspace(prepend_scheme="never"))
SENTENCEPIECES = {"llama": LLAMA, "gemma": GEMMA, "metaspace": METASPACE, "metaspace_never": METASPACE_NEVER}


def stream(tokenizer: tokenizers.Tokenizer, token_ids: Sequence[int], *, skip: bool = True) -> list[str]:
    """The text that each token brings, and last what the flush brings."""
    detokenizer = TokenTable(tokenizer).detokenizer(skip_special_tokens=skip)
    return [*map(detokenizer.feed, token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, END)), st.booleans())
def test_a1_byte_level_text_is_the_librarys_for_any_tokens_at_all(token_ids: list[int], skip: bool) -> None:
    assert "".join(stream(BYTE_LEVEL, token_ids, skip=skip)) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)


@given(st.text())
def test_a1_no_replacement_character_appears_in_valid_text(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = stream(BYTE_LEVEL, token_ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids) == text


@given(st.text())
def test_a2_at_most_three_bytes_are_ever_held_back(text: str) -> None:
    token_ids = list(text.encode())
    released = 0
    detokenizer = TokenTable(BYTE_LEVEL).detokenizer(skip_special_tokens=True)
    for index, token_id in enumerate(token_ids):
        released += len(detokenizer.feed(token_id).encode())
        assert index + 1 - released <= 3


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([0xE4, 0xFF], ["", "\ufffd\ufffd", ""]),  # FF can never continue a character
        ([0xFF, 0x61], ["\ufffd", "a", ""]),
        ([0xF0, 0x9F], ["", "", "\ufffd"]),  # incomplete at the end
        ([0xC3, 0xA9], ["", "é", ""]),
        ([0x80, 0x80], ["\ufffd", "\ufffd", ""]),
    ],
)
def test_a2_invalid_bytes_come_out_at_once_and_incomplete_ones_at_the_end(
    token_ids: list[int], expected: list[str]
) -> None:
    assert stream(BYTE_LEVEL, token_ids) == expected


@pytest.mark.parametrize("name", SENTENCEPIECES)
@given(data=st.data())
def test_a5_sentencepiece_text_is_the_librarys_for_valid_text(name: str, data: st.DataObject) -> None:
    tokenizer = SENTENCEPIECES[name]
    pieces = st.sampled_from([token for token in range(tokenizer.get_vocab_size()) if token not in _BYTES])
    # Whole characters in bytes between ordinary pieces: a run of invalid bytes is where we differ on purpose.
    spelled = st.characters(codec="utf-8").map(lambda char: [_BYTES[0] + byte for byte in char.encode()])
    parts = data.draw(st.lists(st.one_of(pieces.map(lambda piece: [piece]), spelled)))
    token_ids = [token_id for part in parts for token_id in part]
    if name.startswith("metaspace"):  # its decoder has no byte fallback
        token_ids = [token_id for token_id in token_ids if token_id not in _BYTES]
    for skip in (True, False):
        assert "".join(stream(tokenizer, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def id_of(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


_BYTES = range(id_of(LLAMA, "<0x00>"), id_of(LLAMA, "<0xFF>") + 1)


def test_a5_only_the_answers_first_space_is_stripped() -> None:
    a, b = id_of(LLAMA, SPACE + "a"), id_of(LLAMA, SPACE + "b")
    assert stream(LLAMA, [a, b, a]) == ["a", " b", " a", ""]
    assert stream(GEMMA, [a, b]) == [" a", " b", ""]


def test_an_invalid_byte_does_not_spoil_the_valid_ones_beside_it() -> None:
    """The library turns the whole run into U+FFFD; here only the invalid byte is."""
    token_ids = [_BYTES[byte] for byte in "中".encode()] + [_BYTES[0xFF]]
    assert LLAMA.decode(token_ids) == "\ufffd" * 4
    assert "".join(stream(LLAMA, token_ids)) == "中\ufffd"


def test_special_tokens_are_skipped_or_shown_as_asked() -> None:
    assert stream(BYTE_LEVEL, [BOS, 0x61, END]) == ["", "a", "", ""]
    assert stream(BYTE_LEVEL, [BOS, 0x61, END], skip=False) == ["<|bos|>", "a", "<|im_end|>", ""]


def test_added_tokens_that_are_not_byte_level_are_plain_text() -> None:
    tokenizer = library_tokenizer()
    tokenizer.add_tokens(["中文 tool"])
    token_id = id_of(tokenizer, "中文 tool")
    assert "".join(stream(tokenizer, [token_id, 0x61])) == tokenizer.decode([token_id, 0x61]) == "中文 toola"


def test_ids_without_a_token_have_no_text() -> None:
    assert stream(BYTE_LEVEL, [99_999, 0x61]) == ["", "a", ""]


def test_token_bytes_and_texts_stand_alone() -> None:
    table = TokenTable(BYTE_LEVEL)
    assert table.token_bytes(0xC3) == b"\xc3"
    assert table.token_text(0xC3) == "\ufffd"
    assert table.token_text(258) == " the"
    assert table.token_bytes(99_999) == b""


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}, {"type": "Fuse"}],
        },
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
    ],
)
def test_decoders_that_are_not_understood_are_not_guessed(decoder: dict[str, object] | None) -> None:
    assert read_recipe(decoder) is None


WORDPIECE = tokenizers.Tokenizer(
    models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2, "the": 3, "é": 4}, unk_token="[UNK]")
)
WORDPIECE.decoder = decoders.WordPiece(cleanup=False)


@given(st.lists(st.integers(0, 4), max_size=40))
def test_other_decoders_go_through_a_window_of_the_librarys_decode(token_ids: list[int]) -> None:
    assert "".join(stream(WORDPIECE, token_ids)) == WORDPIECE.decode(token_ids)


def test_the_window_holds_an_incomplete_character_back_and_gives_it_up_in_the_end() -> None:
    tokenizer = library_tokenizer()
    # A decoder that is not recognised, but does the same.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("~", 0, 0)])
    assert stream(tokenizer, list("é!".encode())) == ["", "é", "!", ""]
    assert stream(tokenizer, [0x61, 0xC3]) == ["a", "", "\ufffd"]
    assert stream(tokenizer, [0x80] * 4) == ["", "", "", "\ufffd" * 4, ""]
