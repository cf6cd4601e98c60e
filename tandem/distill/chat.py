"""The target's tokenizer and chat template, as transformers has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tandem.distill.asked import Message
from tandem.errors import InvalidRequest
from tandem.models.gguf import quiet


class ModelTokenizer:
    """Messages to token ids, and back to text."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidRequest where the folder has no tokenizer that transformers reads."""
        try:
            with quiet():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises nearly everything for a folder it does not like
            raise InvalidRequest(f"cannot load the tokenizer in {folder}: {error}", param="model") from error
        self._has_template = bool(self._tokenizer.chat_template)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that asks for the next message. A model without a template gets the messages as plain text."""
        if self._has_template:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        else:
            text = "".join(f"{message['content']}\n\n" for message in messages)
        ids: list[int] = self._tokenizer(text, add_special_tokens=not self._has_template)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text
