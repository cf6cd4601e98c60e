"""Take what `tandem distill` made for the bundled target into the package: its layers and its card.

    python scripts/bundle_draft.py ~/.cache/tandem/distill/bundled/draft

Only the layers, since embeddings and head are the target's own: `tandem/models/bundled_draft.py` puts them together.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tandem.distill.writing import CARD, GGUF
from tandem.models.bundled import bundled_layers, default_cache_dir, fetch_bundled
from tandem.models.bundled_draft import extract_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("draft", type=Path, help="the folder that tandem distill wrote")
    draft: Path = parser.parse_args().draft
    layers = bundled_layers()
    layers.parent.mkdir(exist_ok=True)
    extract_layers(draft / GGUF, fetch_bundled(default_cache_dir(), print), layers)
    shutil.copyfile(draft / CARD, layers.parent / CARD)
    print(f"{layers}: {layers.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
