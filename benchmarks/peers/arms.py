"""What is compared: each arm is a peer in one mode, with the settings of which its best is chosen. Data, no code.

A new mode of a peer is a new Arm here; a new peer is a class with the methods of `Peer` and a line in families.py.
Every arm has both thread counts of two cores. Of what else can be set there is a handful: from what each project's own
documentation recommends down to the short drafts that suit a small model on a processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.peers.peer import Setting

THREADS = (1, 2)
BASELINE = "tandem, plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`settings` by a short name for the table."""

    name: str
    family: str
    settings: dict[str, Setting]


def _each(**more: Setting) -> dict[str, Setting]:
    """Every setting of `more`, by its name, with every number of threads."""
    return {
        f"{threads}t {name.replace('__', ' ').replace('_', '-')}".strip(): {"threads": threads, **setting}
        for threads in THREADS
        for name, setting in more.items()
    }


def _threads(setting: Setting | None = None) -> dict[str, Setting]:
    return {f"{threads}t": {"threads": threads, **(setting or {})} for threads in THREADS}


def _llama_ngrams() -> dict[str, Setting]:
    """Of llama.cpp's n-gram drafters: lookup length, draft length."""

    def words(kind: str, **options: int) -> Setting:
        more = [word for name, value in options.items() for word in (f"--spec-{name.replace('_', '-')}", str(value))]
        return {"arguments": ["--spec-type", kind, *more]}

    return _each(
        simple__12_48=words("ngram-simple"),
        simple__4_8=words("ngram-simple", ngram_simple_size_n=4, ngram_simple_size_m=8),
        simple__2_4=words("ngram-simple", ngram_simple_size_n=2, ngram_simple_size_m=4),
        map_k__4_8=words("ngram-map-k", ngram_map_k_size_n=4, ngram_map_k_size_m=8),
        mod__24_64=words("ngram-mod"),
        mod__8_8=words("ngram-mod", ngram_mod_n_match=8, ngram_mod_n_min=1, ngram_mod_n_max=8),
        cache__8=words("ngram-cache", draft_n_max=8),
        cache__3=words("ngram-cache", draft_n_max=3),
    )


_ONE_BY_ONE = {"TANDEM_TARGET_ATTENDS_IN_BLOCKS": "false"}


def _tandem(drafter: str, *arguments: str) -> dict[str, Setting]:
    def setting(k: str | int, environment: dict[str, str]) -> Setting:
        speculation = {"drafter": drafter, "num_draft_tokens": k}
        return {"arguments": arguments, "environment": environment, "speculation": speculation}

    return _each(
        k_auto=setting("auto", {}),
        k_4=setting(4, {}),
        k_8=setting(8, {}),
        k_auto_one_by_one=setting("auto", _ONE_BY_ONE),
    )


def _genai(name: str, *, weights: str) -> tuple[Arm, Arm]:
    """Of its own 4-bit reading of the file ("gguf"), or of the 8-bit model that Tandem serves ("folder")."""
    lookups = ((2, 3), (3, 3), (5, 3), (5, 2), (8, 4))
    return (
        Arm(
            name=f"{name}, plain",
            family="openvino",
            settings=_each(
                paged={"weights": weights, "backend": "PA"}, stateful={"weights": weights, "backend": "SDPA"}
            ),
        ),
        Arm(
            name=f"{name}, lookup",
            family="openvino",
            settings=_each(
                **{
                    f"{k}_{n}": {"weights": weights, "lookup": {"num_assistant_tokens": k, "max_ngram_size": n}}
                    for k, n in lookups
                }
            ),
        ),
    )


def _vllm_ngrams() -> dict[str, Setting]:
    """Draft length and longest lookup; compiled, as is its default."""

    def words(k: int, n: int) -> Setting:
        config = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": n, "prompt_lookup_min": 2}
        return {"arguments": ["--speculative-config", json.dumps(config)]}

    return _each(**{f"{k}_{n}": words(k, n) for k, n in ((2, 3), (4, 3))})


ARMS: tuple[Arm, ...] = (
    Arm(
        name=BASELINE,
        family="tandem",
        settings=_each(
            in_blocks={"arguments": ["--no-draft"], "speculation": {"enabled": False}},
            one_by_one={"arguments": ["--no-draft"], "speculation": {"enabled": False}, "environment": _ONE_BY_ONE},
        ),
    ),
    Arm(name="tandem, n-gram", family="tandem", settings=_tandem("ngram")),
    Arm(name="tandem, n-gram and table", family="tandem", settings=_tandem("auto")),
    Arm(name="tandem, model draft", family="tandem", settings=_tandem("model")),
    Arm(
        name="llama.cpp, plain",
        family="llama_cpp",
        settings=_each(default={}, no_flash_attention={"arguments": ["--flash-attn", "off"]}),
    ),
    Arm(name="llama.cpp, n-gram", family="llama_cpp", settings=_llama_ngrams()),
    *_genai("OpenVINO GenAI", weights="gguf"),
    *_genai("OpenVINO GenAI, Tandem's weights", weights="folder"),
    Arm(name="transformers, plain", family="transformers", settings=_threads()),
    Arm(
        name="transformers, lookup",
        family="transformers",
        settings=_each(
            **{
                f"{k}_{n}": {"generate": {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": n}}
                for k, n in ((3, 2), (5, 2), (10, 2), (10, 3))
            }
        ),
    ),
    Arm(
        name="transformers, early exit",
        family="transformers",
        settings=_each(
            **{
                f"layer_{layers}_k_{k}": {"generate": {"assistant_early_exit": layers, "num_assistant_tokens": k}}
                for layers, k in ((6, 2), (12, 2), (20, 3))
            }
        ),
    ),
    Arm(
        name="vLLM, plain",
        family="vllm",
        settings=_each(compiled={}, eager={"arguments": ["--enforce-eager"]}),
    ),
    Arm(name="vLLM, n-gram", family="vllm", settings=_vllm_ngrams()),
)


def chosen(names: Iterable[str], *, threads: int | None = None) -> tuple[Arm, ...]:
    """The arms whose names begin with one of `names`, and the baseline; all, without names. With `threads`, their
    settings with so many alone. Raises ValueError."""
    wanted = tuple(names)
    for name in wanted:
        if not any(arm.name.startswith(name) for arm in ARMS):
            raise ValueError(f"no arm begins with {name!r}; there are: {'; '.join(arm.name for arm in ARMS)}")
    arms = [arm for arm in ARMS if not wanted or arm.name == BASELINE or arm.name.startswith(wanted)]
    if threads is None:
        return tuple(arms)
    return tuple(
        replace(arm, settings={name: one for name, one in arm.settings.items() if one["threads"] == threads})
        for arm in arms
    )
