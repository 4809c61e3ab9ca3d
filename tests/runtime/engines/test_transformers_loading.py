"""Where models come from: names, folders, live objects, GGUF files; and text in and out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from flowrl.context import Bindings
from flowrl.errors import DataError, ModelError
from flowrl.models import Model, ValueModel
from flowrl.runtime.engines import transformers_loading as loading
from flowrl.runtime.worker import open_engine
from tests.runtime.engines.engines import engine_of
from tests.tiny import EOS, tiny_folder, tiny_model, tiny_tokenizer


def test_a_folder_is_loaded_without_a_sound(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine: Any = open_engine(Model(tiny_folder(tmp_path / "m"), device="cpu"), Bindings(open_engine))
    engine.encode(["hello"])
    engine.export(tmp_path)
    out, err = capfd.readouterr()
    assert out == "" and err == ""
    assert engine.model.name == "m"


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "../a", "a/b/c", Path("/no/such")])
def test_a_missing_folder_is_named(source: Any) -> None:
    with pytest.raises(ModelError) as caught:
        loading.load_module(Model(source))
    text = str(caught.value)
    assert f"there is no folder {str(source)!r}" in text
    assert "Expected" in text and "Received a path that does not exist" in text and "Do: check the path" in text


def test_a_folder_without_a_model_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"holds no model.*config\.json.*Received notes\.txt"):
        loading.load_module(Model(tmp_path))


def test_an_unknown_name_is_one_error_and_does_not_hang() -> None:
    started = time.monotonic()
    for load in (loading.load_module, loading.load_tokenizer):
        with pytest.raises(ModelError, match=r"'no-such-owner/no-such-model'.*Expected.*Received.*Do: "):
            load(Model("no-such-owner/no-such-model"))
    assert time.monotonic() - started < 20


def test_a_hub_that_cannot_be_reached_leaves_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(self: Any, *args: Any, **kwargs: Any) -> None:
        assert kwargs["timeout"] <= 10
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    options: dict[str, Any] = {}
    loading._check_source(Model("owner/name"), "owner/name", options)
    assert options == {"local_files_only": True}


def test_a_name_that_the_hub_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from unittest.mock import MagicMock

    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def unknown(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RepositoryNotFoundError("404", response=MagicMock())

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unknown)
    with pytest.raises(ModelError, match=r"no model 'owner/nmae'.*the Hugging Face Hub knows no such model"):
        loading.load_module(Model("owner/nmae"))


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    tiny_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match=r"its weights cannot be loaded from .*Do: check the files"):
        loading.load_module(Model(tmp_path))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_folder(tmp_path, tied=False)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights.*1 missing: lm_head\.weight"):
        loading.load_module(Model(tmp_path))
    loading.load_module(ValueModel(tmp_path))  # a critic needs the body alone


def test_an_object_that_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be loaded from a dict"):
        loading.load_module(Model({}))


def test_a_live_model_needs_a_tokenizer_only_for_text() -> None:
    engine: Any = open_engine(Model(tiny_model(), name="bare", device="cpu"), Bindings(open_engine))
    with pytest.raises(ModelError, match=r"Model\('bare'\) is a live model without a tokenizer.*tokenizer="):
        engine.encode(["x"])
    assert not engine.has_tokenizer


def test_a_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    model = Model(tiny_model(), tokenizer=tmp_path, device="cpu")
    engine: Any = open_engine(model, Bindings(open_engine))
    assert engine.decode(engine.encode(["héllo"])) == ("héllo",)
    with pytest.raises(ModelError, match="there is no folder"):
        loading.load_tokenizer(Model(tiny_model(), tokenizer=tmp_path / "not"))


def test_text_and_chat_become_tokens() -> None:
    engine = engine_of(tiny_model())
    chat = [{"role": "user", "content": "hi"}]
    tokens = engine.encode(["plain", chat])
    assert tiny_tokenizer().decode(tokens.row(0)) == "plain"
    assert tiny_tokenizer().decode(tokens.row(1)) == f"user: hi{EOS}assistant: "
    assert engine.decode(tokens) == ("plain", "user: hiassistant: ")


def test_chat_needs_a_template() -> None:
    model = Model(tiny_model(), name="base", tokenizer=tiny_tokenizer(chat_template=False), device="cpu")
    engine: Any = open_engine(model, Bindings(open_engine))
    with pytest.raises(ModelError, match=r"Model\('base'\) has no chat template, and the prompt of row 1.*-Instruct"):
        engine.encode(["text", [{"role": "user", "content": "hi"}]])


@pytest.mark.parametrize("message", [3, None, [], [1], {"role": "user"}])
def test_a_prompt_of_another_kind_is_named(message: Any) -> None:
    with pytest.raises(DataError, match=r"prompt of row 0 cannot be read.*Expected a text, or a list"):
        engine_of(tiny_model()).encode([message])


# -- GGUF -------------------------------------------------------------------------------------------------------------


def gguf_folder(folder: Path) -> Path:
    """A GGUF file of a tiny Llama with the tokenizer that GGUF files of Llamas have."""
    import gguf
    import numpy as np

    folder.mkdir()
    module = tiny_model(vocab=64, hidden=32, layers=1, pad_token_id=None, bos_token_id=0, eos_token_id=1)
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(33 + i) for i in range(63)] + ['!"'])
    writer.add_token_types([1] * 64)
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "input_layernorm.weight": "blk.0.attn_norm.weight",
        "post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for name, parameter in module.named_parameters():
        writer.add_tensor(names[name.removeprefix("model.layers.0.")], parameter.detach().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def test_a_gguf_file_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_folder(tmp_path / "weights")
    capfd.readouterr()
    model = Model(folder, load_options={"gguf_file": "tiny.gguf"}, device="cpu")
    engine: Any = open_engine(model, Bindings(open_engine))
    assert capfd.readouterr() == ("", "")
    converted = list((tmp_path / "cache" / "flowrl" / "converted").iterdir())
    assert len(converted) == 1 and (converted[0] / "model.safetensors").is_file()
    monkeypatch.setattr(loading, "_convert", None)  # it is not called again
    again: Any = open_engine(Model(folder, load_options={"gguf_file": "tiny.gguf"}), Bindings(open_engine))
    for (_, a), (_, b) in zip(engine.weights(), again.weights(), strict=True):
        assert a.equal(b)
    assert again.encode(['!"#']).values.tolist() == engine.encode(['!"#']).values.tolist()
    again.export(tmp_path)  # it is an ordinary model now


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = Model(gguf_folder(tmp_path / "weights"), load_options={"gguf_file": "tiny.gguf"}, device="cpu")
    engine: Any = open_engine(model, Bindings(open_engine))
    engine.export(tmp_path)


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    folder = gguf_folder(tmp_path / "weights")
    with pytest.raises(ModelError, match=r"has no file 'typo\.gguf'.*the GGUF files tiny\.gguf"):
        loading.load_module(Model(folder, load_options={"gguf_file": "typo.gguf"}))
