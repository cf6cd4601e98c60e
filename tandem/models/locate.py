"""Where a model's files are here: a Hugging Face folder, a hub id (downloaded), or a GGUF file (converted)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download

from tandem.errors import InvalidRequest, Unavailable, UnknownModel
from tandem.models.gguf import convert_gguf

Progress = Callable[[str], None]

_HUB_ID = re.compile(r"(?P<id>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's files on this machine, and what the services say of them."""

    folder: Path  # config.json, the tokenizer's files, and weights
    model_id: str
    revision: str  # commit on the hub, SHA-256 of a GGUF file, or empty for a plain folder
    gguf: Path | None = None  # the file that the folder was converted from


def locate(source: str, *, cache_dir: Path, progress: Progress) -> ModelFiles:
    """The files of `source`: a Hugging Face folder, a hub id ("organisation/name[@revision]"), or a .gguf file.

    Downloads and converts what is not here yet; converted GGUF files are kept in `cache_dir`. Raises UnknownModel,
    Unavailable or InvalidRequest with a message that says what to do.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        folder, digest = convert_gguf(path.resolve(), cache_dir / "converted", progress)
        return ModelFiles(folder=folder, model_id=path.stem, revision=digest, gguf=path.resolve())
    if path.is_dir():
        return _named_folder(path.resolve())
    if path.is_file():
        raise InvalidRequest(f"{source} is neither a folder nor a .gguf file; name the model's folder", param="model")
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id is None or path.suffix == ".gguf" or source.startswith((".", "~", "/")):
        raise UnknownModel(f"there is no {source}; check the path, or name a model of the Hugging Face hub")
    return _download(hub_id["id"], hub_id["revision"], progress)


def _named_folder(folder: Path) -> ModelFiles:
    """A folder's name; those inside the hub's own cache are `models--<organisation>--<name>/snapshots/<commit>`."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        model_id = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return ModelFiles(folder=folder, model_id=model_id, revision=folder.name)
    return ModelFiles(folder=folder, model_id=folder.name, revision="")


def _download(model_id: str, revision: str | None, progress: Progress) -> ModelFiles:
    progress(f"looking for {model_id} on the Hugging Face hub, and in its cache here")
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=["*.json", "*.jinja", "*.safetensors"],
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
        )
    except hub_errors.GatedRepoError as error:
        raise InvalidRequest(
            f"{model_id} asks you to accept its terms: do so on its page on the hub, then set HF_TOKEN", param="model"
        ) from error
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        raise UnknownModel(
            f"the Hugging Face hub has no {model_id}{at}, and there is no such folder here; check the name (private "
            "models need HF_TOKEN)"
        ) from error
    except (hub_errors.HfHubHTTPError, OSError) as error:
        raise Unavailable(
            f"cannot fetch {model_id} from the Hugging Face hub ({error}); download it on a machine that reaches the "
            "hub (hf download) and give the folder's path instead"
        ) from error
    return ModelFiles(folder=Path(folder), model_id=model_id, revision=Path(folder).name)
