"""Arms: what is compared. Each is a name and the `speculation` object that its requests carry."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tandem.errors import InvalidRequest

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,23}")
_MAX_ARMS: Final = 24  # every k from 1 to 16, and more


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`speculation` goes into the request as it is; what is wrong in it the gateway says."""

    name: str
    speculation: Mapping[str, Any]

    @property
    def speculates(self) -> bool:
        return self.speculation.get("enabled", True) is not False


BASELINE: Final = Arm(name="off", speculation={"enabled": False})
ON: Final = Arm(name="on", speculation={"enabled": True})


def chosen_arms(words: Sequence[str]) -> tuple[Arm, ...]:
    """The baseline, and the arms in `words`, each NAME=JSON; without words, speculation on. Raises InvalidRequest."""
    arms = (BASELINE, *map(parse_arm, words)) if words else (BASELINE, ON)
    if len(arms) > _MAX_ARMS:
        raise InvalidRequest(f"at most {_MAX_ARMS - 1} arms, got {len(words)}", param="arm")
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            what = "the baseline, plain decoding" if name == BASELINE.name else "another arm already"
            raise InvalidRequest(f"--arm {name}: that is the name of {what}; choose another", param="arm")
    return arms


def parse_arm(word: str) -> Arm:
    """`NAME=JSON`, as in k4={"num_draft_tokens": 4}. Raises InvalidRequest."""
    name, separator, text = word.partition("=")
    if not separator or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"--arm {word[:80]!r}: write NAME=JSON, as in --arm 'k4={{\"num_draft_tokens\": 4}}'; a name has letters, "
            "digits, _ . and -, at most 24",
            param="arm",
        )
    try:
        speculation = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"--arm {name}: not JSON ({error})", param="arm") from None
    if not isinstance(speculation, dict):
        raise InvalidRequest(f"--arm {name}: must be a JSON object, a request's `speculation`", param="arm")
    return Arm(name=name, speculation=speculation)
