"""From token ids to text, one token at a time, byte for byte as decoding them all at once.

Decoding token by token with the library loses what spans tokens: a character cut in two, a leading space. So the
exact bytes of every token are derived from the decoder in tokenizer.json, and an incremental UTF-8 decoder turns them
into text. It holds back nothing but an incomplete tail, at most three bytes; bytes that no continuation can make
valid come out as U+FFFD at once. (The library's ByteFallback writes one U+FFFD for every byte of a run that holds an
invalid byte, valid characters included; here only the invalid bytes become U+FFFD.)

Decoders read this way: ByteLevel (GPT-2, Llama 3, Qwen, SmolLM), the SentencePiece chain Replace, ByteFallback, Fuse,
Strip (Llama 2, Mistral, Gemma), and Metaspace. Any other goes through a window over the library's own decode.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers


class Detokenizer(Protocol):
    """The text of one answer, as it grows."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else ""."""


class TokenTable:
    """Texts and bytes of single tokens, and detokenisers over them. One per tokenizer, shared by all requests."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._recipe = read_recipe(json.loads(tokenizer.to_str()).get("decoder"))
        self._special = frozenset(
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        )
        self._bytes: dict[int, bytes] = {}  # filled as tokens are seen; bounded by the vocabulary

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds in the middle of a text. Empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._derive(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token on its own, incomplete characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokeniser for one answer."""
        if self._recipe is None:
            return _Windowed(self._tokenizer, skip_special_tokens=skip_special_tokens)
        return _Incremental(self, self._recipe, skip_special_tokens=skip_special_tokens)

    def first_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, for the first token of a text."""
        if self._recipe is None or self._recipe.first_token_drops is None:
            return self.token_bytes(token_id)
        token = self._tokenizer.id_to_token(token_id) or ""
        return self._recipe.bytes_of(token.replace(self._recipe.first_token_drops, ""))

    def _derive(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._recipe is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._recipe.bytes_of(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a decoder turns a token's string into bytes, and what it does at the start of a text."""

    char_bytes: Mapping[str, int] | None = None  # ByteLevel: one printable character for each byte
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False  # the token <0xE4> is the byte E4
    strip_char: str = " "
    strip_count: int = 0  # leading strip_chars of the whole text that go
    first_token_drops: str | None = None  # Metaspace: the first token loses every one of these

    def bytes_of(self, token: str) -> bytes:
        if self.char_bytes is not None:
            try:
                return bytes([self.char_bytes[char] for char in token])
            except KeyError:  # an added token, which is plain text
                return token.encode()
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def read_recipe(decoder: Mapping[str, Any] | None) -> Recipe | None:
    """The recipe for the `decoder` entry of tokenizer.json; None where only the library's decode will do."""
    if decoder is None:
        return None
    steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [step["type"] for step in steps]:
        case ["ByteLevel"] | ["ByteLevel", "Fuse"]:
            return Recipe(char_bytes=byte_level_alphabet())
        case ["Metaspace"] | ["ByteFallback", "Metaspace"]:
            metaspace = steps[-1]
            keeps_first = metaspace.get("prepend_scheme") == "never"
            return Recipe(
                replacements=((metaspace["replacement"], " "),),
                byte_fallback=len(steps) == 2,
                first_token_drops=None if keeps_first else metaspace["replacement"],
            )
        case [*kinds] if _is_sentencepiece(steps, kinds):
            strip: Mapping[str, Any] = steps[-1] if kinds[-1] == "Strip" else {}
            return Recipe(
                replacements=tuple((s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"),
                byte_fallback="ByteFallback" in kinds,
                strip_char=strip.get("content", " "),
                strip_count=strip.get("start", 0),
            )
        case _:
            return None


def _is_sentencepiece(steps: list[Mapping[str, Any]], kinds: list[str]) -> bool:
    """Replace (of a string) any number of times, ByteFallback or not, Fuse, Strip (at the left only) or not."""
    expected = ["Replace"] * kinds.count("Replace")
    expected += ["ByteFallback"] * ("ByteFallback" in kinds) + ["Fuse"] + ["Strip"] * ("Strip" in kinds)
    return (
        kinds == expected
        and all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
        and all(step["stop"] == 0 for step in steps if step["type"] == "Strip")
    )


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, reversed: printable Latin-1 stands for itself, the rest follows from U+0100.

    Source: `bytes_to_unicode` in openai/gpt-2, src/encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


class _Incremental:
    """Exact bytes through an incremental UTF-8 decoder."""

    def __init__(self, table: TokenTable, recipe: Recipe, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True
        self._strip_char = recipe.strip_char
        self._strip_left = recipe.strip_count

    def feed(self, token_id: int) -> str:
        if self._skip_special_tokens and self._table.is_special(token_id):
            return ""
        token_bytes = self._table.first_bytes(token_id) if self._at_start else self._table.token_bytes(token_id)
        self._at_start = False
        return self._strip(self._decoder.decode(token_bytes))

    def flush(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


class _Windowed:
    """For unknown decoders: decode a window with and without the new tokens; the difference is the new text.

    Text that ends in U+FFFD may be an incomplete character and is held back, but not for more than four tokens, as no
    character has more than four bytes. The window begins a few tokens back, so that what a decoder does at the start
    of a text does not happen again in its middle.
    """

    _LOOK_BACK = 6
    _MAX_HELD = 4

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_read = 0  # tokens of the window whose text is out

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._advance(force=len(self._window) - self._num_read >= self._MAX_HELD)

    def flush(self) -> str:
        return self._advance(force=True)

    def _advance(self, *, force: bool) -> str:
        before = self._decode(self._window[: self._num_read])
        after = self._decode(self._window)
        if not force and after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._num_read = len(self._window)
        excess = len(self._window) - self._LOOK_BACK
        if excess > 0:
            del self._window[:excess]
            self._num_read -= excess
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
