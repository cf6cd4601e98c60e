"""A prompt given back: its text, and where in it each of its tokens begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`offsets` holds one character index into `text` for every token of the prompt."""

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]


def echo_of(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, given: str | None, skip_special_tokens: bool = True
) -> Echo:
    """The echo of one prompt. `given` is its text where the client sent text, which comes back letter for letter.

    Of a prompt that was sent as ids the text is decoded, with special tokens unless they are skipped. Tokens without
    text of their own (the beginning of a character, a special token that is not in the text) share their offset with
    the next one. Where a tokenizer changes the text (normalises it), offsets behind the change are the nearest before.
    """
    if given is None:
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        shares = [detokenizer.feed(token_id) for token_id in token_ids]
        shares[-1] += detokenizer.flush()
        text = "".join(shares)
    else:
        text = given
        # Without the special tokens, so that one at the front (BOS) does not hide that a text begins behind it.
        detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
        shares = [detokenizer.feed(token_id) for token_id in token_ids]
        shares = [
            tokenizer.token_text(token_id) if tokenizer.is_special(token_id) else share
            for token_id, share in zip(token_ids, shares, strict=True)
        ]
    offsets: list[int] = []
    position = 0
    for share in shares:
        offsets.append(position)
        if text.startswith(share, position):
            position += len(share)
    return Echo(text, tuple(token_ids), tuple(offsets))
