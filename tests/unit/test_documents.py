"""The helpers behind tests/integration/test_docs.py find what is in a page, and find fault with what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.document_checks import problem
from tests.documents import anchors, blocks, commands, hidden_commands, links, spans, table_rows

PAGE = """\
# A page: with `code` (and more)

Prose with `make test` and a [link](other.md#part), `tandem` alone, `make
check` over two lines.

```
make up            # comment
TANDEM_X=1 tandem bench --arm 'a={"k": 1}' \\
    --turns 1 && curl localhost:8000/health | make test
```

    tandem down

1. An item, whose text
   goes on and is no code.

       tandem models list

   ```json
   {"prompt": "make me a [poem](none.md)"}
   ```

    tandem version

| a | b |
|---|---|
| 1 | 2 |
"""


def test_commands_are_found_in_blocks_lists_and_prose_with_their_lines() -> None:
    found = {(one.place.line, one.words[0], *one.words[1:2]) for one in commands(PAGE, file="p.md")}
    assert found == {
        (3, "make", "test"),
        (3, "make", "check"),
        (7, "make", "up"),
        (8, "tandem", "bench"),
        (8, "curl", "localhost:8000/health"),
        (8, "make", "test"),
        (12, "tandem", "down"),
        (17, "tandem", "models"),
    }


def test_a_command_is_whole_and_its_settings_are_apart() -> None:
    (bench,) = [one for one in commands(PAGE, file="p.md") if "bench" in one.words]
    assert bench.settings == {"TANDEM_X": "1"}
    assert bench.words == ("tandem", "bench", "--arm", 'a={"k": 1}', "--turns", "1")


def test_what_is_in_a_list_and_no_deeper_is_no_code() -> None:
    """Four columns are code outside of lists only: here, the item's own text begins at the third."""
    assert [(block.place.line, block.language) for block in blocks(PAGE, file="p.md")] == [
        (6, ""),
        (11, ""),
        (16, ""),
        (19, "json"),
    ]


def test_links_anchors_and_tables_are_those_of_the_prose() -> None:
    assert [(place.line, target) for place, target in links(PAGE, file="p.md")] == [(3, "other.md#part")]
    assert anchors(PAGE, file="p.md") == {"a-page-with-code-and-more"}
    assert spans(PAGE, file="p.md")[-1] == (3, "make check")
    assert list(table_rows(PAGE))[-1] == ("1", "2")


def test_a_command_in_a_block_of_another_language_is_seen() -> None:
    assert hidden_commands("```text\nall is well\nX=1 make up\n```\n", file="p.md") == ["p.md:3"]


def test_what_ends_in_the_middle_is_named() -> None:
    with pytest.raises(ValueError, match=r"p\.md:2: .*quot"):
        commands("```\nmake 'up\n```\n", file="p.md")
    with pytest.raises(ValueError, match=r"p\.md:1: .*backslash"):
        commands("```\nmake \\\n```\n", file="p.md")


WRONG = [
    "rm -rf everything",
    "tandem upp",
    "tandem up --modle x",
    "tandem up --port 99999",
    "tandem bench --workload benchmarks/data/none.jsonl",
    "tandem bench --arm 'a={'",
    "TANDEM_TARGET_MODLE=x tandem up",
    "TANDEM_GATEWAY_PORT=many tandem up",
    "TANDEM_GATEWAY_MAX_N=100",
    "make tea",
    "make bench BENCH_ARG=x",
    "docker compose -f docker-compose.tpu.yml up",
    "docker compose --profile dreaming up",
    "docker compose up nobody",
    "docker run tandem",
    "python -m benchmarks.nothing",
    "python -m benchmarks.gpu_check --jsn x",
    "python -m http.server",
    "pip install other",
    "pip install 'tandem-serve[all]'",
    "pytest tests/unit/test_nothing.py",
    "pytest -m hard tests/unit",
    "openssl s_client",
    "deploy/nothing.sh",
    "curl https://example.org/",
]
RIGHT = [
    "tandem up --port 8001 --detach",
    "tandem bench --workload yours.jsonl --arm 'a={}'",
    "tandem advise /var/lib/prompts.jsonl",
    "TANDEM_TARGET_KV_CACHE_BYTES=9663676416 .venv/bin/tandem up",
    "TANDEM_GATEWAY_MAX_N=2",
    "make bench BENCH_ARGS=--quick",
    "docker compose -f docker-compose.yml -f docker-compose.gpu.yml up -d target",
    "docker compose --profile monitoring up",
    "python -m gateway",
    "python -m benchmarks.gpu_check --json=x",
    "pip install 'tandem-serve[bench,tracing]'",
    "pytest -m 'not slow' tests/unit/test_documents.py",
    "openssl rand -hex 32",
    "deploy/certificates.sh secrets/tls HOST",
    "curl localhost:8000/health",
]


def _problems(written: str, folder: Path) -> list[str]:
    found = [problem(command, folder) for command in commands(f"```\n{written}\n```\n", file="p.md")]
    assert found
    return [each for each in found if each is not None]


@pytest.mark.parametrize("written", WRONG)
def test_what_would_not_work_is_found_with_its_place(written: str, tmp_path: Path) -> None:
    (found,) = _problems(written, tmp_path)
    assert found.startswith("p.md:2: ")


@pytest.mark.parametrize("written", RIGHT)
def test_what_would_work_is_let_through(written: str, tmp_path: Path) -> None:
    assert _problems(written, tmp_path) == []
