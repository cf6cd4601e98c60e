"""Questions of Spec-Bench (Apache-2.0, benchmarks/data/spec_bench.jsonl), for tests. Never trained on."""

from __future__ import annotations

import json
from pathlib import Path

_FILE = Path(__file__).parent.parent / "benchmarks" / "data" / "spec_bench.jsonl"


def spec_bench(count: int) -> list[str]:
    """First turns, `count` of them, evenly spread over the 480 questions and so over all categories."""
    with _FILE.open(encoding="utf-8") as lines:
        turns = [str(json.loads(line)["turns"][0]) for line in lines]
    return [turns[i * len(turns) // count] for i in range(count)]
