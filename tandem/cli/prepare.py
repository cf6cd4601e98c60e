"""`python -m tandem.cli.prepare MODEL`: fetch and convert a model as a service would, and see that it loads.

A process of its own, since it needs torch, which the command line does without.
"""

from __future__ import annotations

import sys

from tandem.cli.console import print_error, printable, stderr_console
from tandem.errors import TandemError
from tandem.models.bundled import default_cache_dir, fetch_bundled


def main() -> int:
    console = stderr_console()

    def say(line: str) -> None:
        console.print(printable(line), soft_wrap=True, markup=False)

    name, cache_dir = sys.argv[1], default_cache_dir()
    try:
        from tandem.models.loading import load_model
    except ImportError as error:
        print_error(console, f"{error.name} is missing, which models need: pip install 'tandem-serve[model]'")
        return 1
    try:
        source = fetch_bundled(cache_dir, say) if name == "bundled" else name
        # One layer shows whether it loads, without the memory of all of them.
        load_model(source, device="cpu", dtype="float32", num_layers=1, cache_dir=cache_dir, progress=say)
    except TandemError as error:
        print_error(console, error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
