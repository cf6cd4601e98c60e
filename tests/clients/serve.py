"""`python -m tests.clients.serve`, in the project's own environment: serves a tiny random model until stdin closes.

The client packages live in an environment without torch of ours, so the tests there start this as a child. It prints
the gateway's address once the stack is ready.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.stack import Stack
from tests.tiny_models import write_draft, write_target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--bundled", action="store_true", help="the bundled model instead of a tiny random one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.bundled:
            target = draft = "bundled"
        else:
            target_folder = write_target(folder / "target", context_length=arguments.context_length)
            target, draft = str(target_folder), str(write_draft(target_folder, folder / "draft", noise=0.05))
        with Stack(folder=folder, target_model=target, draft_model=draft) as stack:
            print(stack.url, flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
