"""A model's tokenizer as files: what the gateway is sent, and the fingerprint by which two tokenizers are the same.

Plain JSON reading: nothing here loads torch or transformers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tandem.errors import InvalidRequest

TOKENIZER = "tokenizer.json"
_OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Content by name of the files that make up the tokenizer: tokenizer.json, and those of its companions that exist.

    Raises InvalidRequest when there is no tokenizer.json.
    """
    files = {TOKENIZER: _read_tokenizer(folder)}
    for name in _OPTIONAL:
        path = folder / name
        if path.is_file():
            files[name] = path.read_bytes()
    return files


def vocabulary(folder: Path) -> dict[int, str]:
    """Token by id, added tokens included; where both name an id, the added token counts, as in `tokenizers`.

    Raises InvalidRequest when there is no tokenizer.json, or not one that can be read.
    """
    try:
        content: dict[str, Any] = json.loads(_read_tokenizer(folder))
        tokens = content["model"]["vocab"]
        # Unigram models list [token, score] in the order of ids; all others map tokens to ids.
        pairs = ((token, i) for i, (token, _) in enumerate(tokens)) if isinstance(tokens, list) else tokens.items()
        by_id = {int(i): str(token) for token, i in pairs}
        by_id.update((int(token["id"]), str(token["content"])) for token in content.get("added_tokens") or [])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(
            f"{folder / TOKENIZER} is not a tokenizer of the `tokenizers` library ({error!r}); download it again, or "
            "write it anew with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            param="model",
        ) from error
    return by_id


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 (hex) over all (id, token) pairs in the order of ids: equal for two models iff ids mean the same tokens.

    Chat templates, merges and normalisation do not count: they concern the gateway, which has one tokenizer only.
    """
    digest = hashlib.sha256()
    for token_id, token in sorted(vocabulary(folder).items()):
        text = token.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def _read_tokenizer(folder: Path) -> bytes:
    try:
        return (folder / TOKENIZER).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidRequest(
            f"no {TOKENIZER} in {folder}; download it with the model, or write it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            param="model",
        ) from error
