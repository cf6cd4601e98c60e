"""Loading models: tiny ones written here as safetensors and GGUF, and the bundled one for real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from tandem.engine.runner import RaggedBatch
from tandem.engine.torch_runner import TorchRunner
from tandem.errors import InvalidRequest, Unavailable, UnknownModel
from tandem.models import gguf as gguf_conversion
from tandem.models import locate as locating
from tandem.models.bundled import default_cache_dir, fetch_bundled
from tandem.models.loading import LoadedModel, choose_device, choose_dtype, load_model
from tandem.models.locate import ModelFiles, locate
from tandem.models.tokenizer_files import tokenizer_files, tokenizer_fingerprint, vocabulary

WORDS = ["<unk>", "<end>", "w", "1", *(f"w{i}" for i in range(88))]
ADDED = ["<turn>"]  # an added token: id 92
VOCAB = len(WORDS) + len(ADDED)
ROWS = 104
SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
TOKENS = torch.tensor([[5, 9, 33, 2, 71]])


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def find(source: str | Path, *, cache_dir: Path | None = None) -> ModelFiles:
    return locate(str(source), cache_dir=cache_dir or default_cache_dir(), progress=lambda message: None)


def load(source: str | Path, *, cache_dir: Path | None = None, **options: Any) -> LoadedModel:
    return load_model(find(source, cache_dir=cache_dir), **options)


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(ADDED)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))


def write_model(folder: Path, config: PreTrainedConfig | None = None) -> Any:
    """A tiny random model with its tokenizer; returns the model."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config or transformers.LlamaConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result = model(input_ids=TOKENS, use_cache=False).logits
    assert isinstance(result, torch.Tensor)
    return result


def test_a_folder_is_loaded_with_what_the_services_say_of_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    GenerationConfig(eos_token_id=[92, 1]).save_pretrained(tmp_path / "tiny")
    loaded = load(tmp_path / "tiny", device="cpu", dtype="float32")
    assert torch.equal(logits(loaded.model), logits(model))
    assert not loaded.model.training
    files = find(tmp_path / "tiny")
    assert (files.model_id, files.revision, files.folder) == ("tiny", "", tmp_path / "tiny")
    assert loaded.vocab_size == VOCAB
    assert loaded.context_length == 64
    assert loaded.end_token_ids == (1, 92)
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)


def test_weights_come_in_the_dtype_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path)
    loaded = load(tmp_path, device="cpu", dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_the_tokenizer_s_end_token_counts_and_ids_beyond_the_vocabulary_do_not(tmp_path: Path) -> None:
    write_model(tmp_path)
    GenerationConfig(eos_token_id=[92, ROWS - 1]).save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu", dtype="float32").end_token_ids == (1, 92)


def test_the_vocabulary_is_never_larger_than_the_embeddings(tmp_path: Path) -> None:
    write_model(tmp_path, transformers.LlamaConfig(**{**SIZES, "vocab_size": 80}))
    assert load(tmp_path, device="cpu", dtype="float32").vocab_size == 80


@pytest.mark.parametrize(
    ("can", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_on_cpu_follows_the_instructions(can: dict[str, bool], expected: torch.dtype) -> None:
    assert choose_dtype("auto", torch.device("cpu"), can) == expected


@pytest.mark.parametrize(("supported", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_dtype_on_cuda(monkeypatch: pytest.MonkeyPatch, supported: bool, expected: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert choose_dtype("auto", torch.device("cuda")) == expected


def test_named_dtypes_and_devices() -> None:
    assert choose_dtype("float16", torch.device("cpu")) == torch.float16
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidRequest, match="auto, float32, bfloat16, float16"):
        choose_dtype("int8", torch.device("cpu"))
    with pytest.raises(InvalidRequest, match="cuda:<number>"):
        choose_device("gpu")
    with pytest.raises(InvalidRequest, match="torch sees"):
        choose_device("cuda:99")


def test_auto_device_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")


def only_pickles(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('this must never run')")


def empty_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("[]")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "only pickles": (only_pickles, "can run code"),
    "a weight is lost": (lose_a_weight, r"lacks 1 of .*up_proj"),
    "its own code": (own_code, "custom code"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "Hugging Face folder"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json"),
    "another tokenizer": (empty_tokenizer, "download it again"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_refused(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path)
    spoil, message = BROKEN[kind]
    spoil(tmp_path)
    with pytest.raises(InvalidRequest, match=message) as caught:
        load(tmp_path, device="cpu", dtype="float32")
    assert caught.value.param == "model"


def test_paths_that_are_not_there_never_go_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locating, "snapshot_download", lambda *_, **__: pytest.fail("went to the hub"))
    for source in (str(tmp_path / "nothing"), "./nothing", "nothing.gguf", "a/b/c"):
        with pytest.raises(UnknownModel, match="check the path"):
            load(source)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"nor a \.gguf file"):
        load(tmp_path / "model.bin")


def test_a_hub_id_is_downloaded_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "0123abcd"
    write_model(snapshot)
    asked: list[tuple[str, str | None]] = []

    def download(repo_id: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.append((repo_id, revision))
        assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in patterns["allow_patterns"])
        return str(snapshot)

    monkeypatch.setattr(locating, "snapshot_download", download)
    files = find("org/tiny@v1.0")
    assert asked == [("org/tiny", "v1.0")]
    assert (files.model_id, files.revision) == ("org/tiny", "0123abcd")
    assert find(snapshot) == files  # the same, named by its path


def test_a_hub_that_is_not_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise hub_errors.LocalEntryNotFoundError("name or service not known")

    monkeypatch.setattr(locating, "snapshot_download", offline)
    with pytest.raises(Unavailable, match="give the folder's path"):
        load("org/tiny")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_first_layers_alone_make_a_draft(tmp_path: Path, family: str) -> None:
    configs: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16),
    }
    model = write_model(tmp_path, configs[family]())
    loaded = load(tmp_path, device="cpu", dtype="float32", num_layers=2)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    assert torch.equal(logits(loaded.model), logits(model))
    assert sum("layers.2." in name for name, _ in loaded.model.named_parameters()) == 0
    TorchRunner(loaded.model, vocab_size=loaded.vocab_size, block_size=4, num_blocks=4)
    for number in (0, 5):
        with pytest.raises(InvalidRequest, match="between 1 and the model's 4"):
            load(tmp_path, device="cpu", dtype="float32", num_layers=number)


def test_tokenizer_files_are_those_that_exist(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "notes.txt").write_text("not a tokenizer's")
    files = tokenizer_files(tmp_path)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files["chat_template.jinja"] == b"{{ messages }}"
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        tokenizer_files(tmp_path / "elsewhere")


def test_the_fingerprint_follows_ids_and_tokens_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert vocabulary(tmp_path) == dict(enumerate(WORDS + ADDED))
    original = tokenizer_fingerprint(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())

    def changed(change: Callable[[dict[str, Any]], object]) -> str:
        other = json.loads(json.dumps(content))
        change(other)
        (tmp_path / "tokenizer.json").write_text(json.dumps(other))
        return tokenizer_fingerprint(tmp_path)

    assert changed(lambda c: c.update(pre_tokenizer=None, padding=None)) == original
    assert changed(lambda c: c["model"].update(vocab=dict(reversed(c["model"]["vocab"].items())))) == original
    unigram = {"type": "Unigram", "vocab": [[word, -1.0] for word in WORDS]}
    assert changed(lambda c: c.update(model=unigram)) == original  # the same map, written as a list
    assert changed(lambda c: c["model"]["vocab"].update(w3=4, w2=5)) != original
    assert changed(lambda c: c["added_tokens"].clear()) != original
    assert changed(lambda c: c["added_tokens"][0].update(content="<other>")) != original


def write_gguf(path: Path, *, round_to: torch.dtype = torch.float32, without: str = "lm_head.weight") -> Any:
    """A tiny Qwen 2 model as a GGUF file, weights rounded to `round_to` but stored in float32; returns the model.

    The head is tied to the embeddings, so that it is the one weight not written; or name another instead.
    """
    torch.manual_seed(4)
    model: Any = AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**{**SIZES, "vocab_size": VOCAB}, tie_word_embeddings=True)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(round_to))
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_block_count(4)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS + ADDED)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(WORDS) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["w 1"])
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 4)
    for name, weight in model.state_dict().items():
        if name not in ("lm_head.weight", without):
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None
            writer.add_tensor(gguf_name, weight.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_is_converted_once_and_found_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_gguf(tmp_path / "tiny.Q9.gguf")
    cache = tmp_path / "cache"
    loaded = load(tmp_path / "tiny.Q9.gguf", device="cpu", dtype="float32", cache_dir=cache)
    torch.testing.assert_close(logits(loaded.model), logits(model))
    files = find(tmp_path / "tiny.Q9.gguf", cache_dir=cache)
    assert files.model_id == "tiny.Q9"
    assert len(files.revision) == 64
    assert (loaded.vocab_size, loaded.context_length, loaded.end_token_ids) == (VOCAB, 64, (1,))
    assert set(tokenizer_files(files.folder)) >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert not list((cache / "converted").glob(".converting-*"))

    monkeypatch.setattr(gguf_conversion, "load_gguf_checkpoint", lambda *_, **__: pytest.fail("converted again"))
    shutil.copy(tmp_path / "tiny.Q9.gguf", tmp_path / "moved.gguf")  # another name and time, the same content
    for name in ("tiny.Q9", "moved"):
        again = load(tmp_path / f"{name}.gguf", device="cpu", dtype="float32", cache_dir=cache)
        assert torch.equal(logits(again.model), logits(loaded.model))
        found = find(tmp_path / f"{name}.gguf", cache_dir=cache)
        assert (found.model_id, found.folder) == (name, files.folder)


def test_a_changed_gguf_file_is_converted_anew(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    first = find(tmp_path / "tiny.gguf", cache_dir=tmp_path)
    model = write_gguf(tmp_path / "tiny.gguf", round_to=torch.float16)
    second = find(tmp_path / "tiny.gguf", cache_dir=tmp_path)
    assert second.revision != first.revision
    loaded = load(tmp_path / "tiny.gguf", device="cpu", dtype="float32", cache_dir=tmp_path)
    torch.testing.assert_close(logits(loaded.model), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_conversion_loses_nothing_and_wastes_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", round_to=dtype)
    loaded = load(tmp_path / "tiny.gguf", device="cpu", dtype="float32", cache_dir=tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    folder = find(tmp_path / "tiny.gguf", cache_dir=tmp_path).folder
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {dtype}


def test_a_gguf_file_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really, or no longer")
    with pytest.raises(InvalidRequest, match=r"cannot read broken\.gguf"):
        load(tmp_path / "broken.gguf", device="cpu", cache_dir=tmp_path)
    assert not [path for path in (tmp_path / "converted").iterdir() if path.is_dir()]


def test_a_gguf_file_that_lacks_a_weight_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "torn.gguf", without="model.layers.3.mlp.down_proj.weight")
    with pytest.raises(InvalidRequest, match=r"lacks 1 of .*3\.mlp\.down_proj"):
        load(tmp_path / "torn.gguf", device="cpu", cache_dir=tmp_path)
    assert not [path for path in (tmp_path / "converted").iterdir() if path.is_dir()]


@pytest.mark.bundled
@pytest.mark.slow
def test_the_bundled_model_speaks_as_transformers_lets_it(tmp_path: Path) -> None:
    """Greedy text of the paged runner and of plain `generate`, token for token, in float32."""
    cache = default_cache_dir()
    loaded = load(fetch_bundled(cache, print), device="cpu", dtype="float32", cache_dir=cache)
    assert (loaded.vocab_size, loaded.context_length, loaded.end_token_ids) == (49152, 8192, (2,))
    tokenizer = Tokenizer.from_file(str(find(fetch_bundled(cache, print), cache_dir=cache).folder / "tokenizer.json"))
    text = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    model: Any = loaded.model
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
        )[0, len(prompt) :].tolist()

    runner = TorchRunner(loaded.model, vocab_size=loaded.vocab_size, block_size=16, num_blocks=8)
    generated: list[int] = []
    new = prompt
    for _ in range(24):
        past = 0 if new is prompt else len(prompt) + len(generated) - 1
        batch = RaggedBatch(
            token_ids=np.array(new, dtype=np.int32),
            position_ids=np.arange(past, past + len(new), dtype=np.int32),
            past_lens=np.array([past], dtype=np.int32),
            sequence_starts=np.array([0, len(new)], dtype=np.int32),
            decode_starts=np.array([past], dtype=np.int32),
            block_table=np.array([5, 2, 7, 1, 4], dtype=np.int32),
            block_starts=np.array([0, 5], dtype=np.int32),
            logits_rows=np.array([len(new) - 1], dtype=np.int32),
        )
        generated.append(int(runner.forward(batch).argmax()))
        new = generated[-1:]
        if generated[-1] in loaded.end_token_ids:
            break
    assert generated == expected
