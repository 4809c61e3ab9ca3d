"""Architectures against the real models of transformers: names, shapes and numbers of every tensor of every family."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.compiler.architecture import Architecture, known_architecture
from flowrl.compiler.architecture_known import KNOWN_CONFIGS, known_config
from flowrl.compiler.model_architecture import architecture_of
from flowrl.errors import FlowError
from flowrl.models import Model, RewardModel, ValueModel
from tests.compiler.families import FAMILIES, MIXTURES, tiny_config, tiny_lm


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_that_of_the_real_model_by_name_shape_and_order(family: str) -> None:
    config = tiny_config(family)
    model = tiny_lm(config)
    architecture = Architecture.from_config(config.to_dict())
    found = [(p.name, p.shape) for p in architecture.parameters(fused_experts=True) if p.tied_to is None]
    assert found == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert architecture.num_parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_in_files_are_those_that_the_library_saves(family: str, tmp_path: Path) -> None:
    """Of a mixture each expert has its own in a file, whatever the library holds while it runs."""
    from safetensors import safe_open

    config = tiny_config(family)
    tiny_lm(config).save_pretrained(tmp_path)
    architecture = Architecture.from_config(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        # A correction of the router is a buffer: it is saved, but no parameter.
        saved = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys() if "e_score_correction" not in n}  # noqa: SIM118
    parameters = architecture.parameters()
    assert {p.name: p.shape for p in parameters if p.tied_to is None} == saved
    assert sum(p.size for p in parameters) == architecture.num_parameters()
    experts = {p.expert for p in parameters if p.expert is not None}
    assert experts == (set(range(4)) if family in MIXTURES else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_head_is_the_trunk_and_one_linear_layer(family: str) -> None:
    """As the engine builds a ValueModel: the body of the language model, and ``nn.Linear(hidden, 1)``."""
    import torch
    from transformers import AutoModel

    config = tiny_config(family)
    trunk = AutoModel.from_config(config)
    head = torch.nn.Linear(config.hidden_size, 1)
    architecture = Architecture.from_config(config)
    assert architecture.num_parameters("value") == sum(p.numel() for m in (trunk, head) for p in m.parameters())
    ends = [p.shape for p in architecture.parameters("value")[-2:]]
    assert ends == [tuple(p.shape) for p in head.parameters()]


def test_the_engine_holds_as_many_numbers_as_estimated() -> None:
    """Of a policy and of a critic that flowrl itself makes."""
    from flowrl.context import Bindings, use_bindings
    from flowrl.runtime.worker import open_engine
    from flowrl.tiny import tiny_model

    for made, head in ((Model, "lm"), (ValueModel, "value")):
        model = made(tiny_model(), name=f"m-{head}")
        with use_bindings(Bindings(open_engine)):
            engine: Any = model.bound_engine()
            held = sum(p.numel() for _, p in engine.trained_parameters())
            engine.close()
        assert architecture_of(model).num_parameters(head) == held  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_layers_and_of_what_is_outside_add_up(family: str) -> None:
    architecture = Architecture.from_config(tiny_config(family))
    by_layer: dict[int | None, int] = {}
    split: dict[int | None, int] = {}
    for p in architecture.parameters():
        by_layer[p.layer] = by_layer.get(p.layer, 0) + p.size
        split[p.layer] = split.get(p.layer, 0) + (p.size if p.split is not None else 0)
    assert by_layer.pop(None) == architecture.outer_parameters()
    assert by_layer == {i: architecture.layer_parameters(i) for i in range(3)}
    assert {i: split[i] for i in range(3)} == {i: architecture.split_parameters(i) for i in range(3)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "mixtral"])
def test_tensor_parallel_dims_are_those_of_the_librarys_own_plan(family: str) -> None:
    """transformers says which linear layers are column- and which are row-parallel; dims are torch's ``[out, in]``."""
    config = tiny_config(family)
    plan = config.base_model_tp_plan
    dims = {"colwise": 0, "rowwise": 1}
    checked = 0
    for p in Architecture.from_config(config).parameters():
        if p.layer is None or not p.name.endswith(".weight"):
            continue
        module = p.name.removeprefix("model.").removesuffix(".weight").replace(f"layers.{p.layer}.", "layers.*.")
        if plan.get(module) in dims:
            assert p.split == dims[plan[module]], p.name
            checked += 1
        elif len(p.shape) == 1:
            assert p.split is None, p.name
    assert checked >= (4 if family == "mixtral" else 7) * 3


@pytest.mark.parametrize("family", MIXTURES)
def test_active_parameters_are_those_without_the_experts_that_are_not_chosen(family: str) -> None:
    architecture = Architecture.from_config(tiny_config(family))
    idle = [p.size for p in architecture.parameters() if p.expert is not None and p.expert >= 2]
    assert architecture.active_parameters() == architecture.num_parameters() - sum(idle)
    assert architecture.active_parameters() < architecture.num_parameters()


def test_adapters_are_counted_as_the_engine_makes_them() -> None:
    pytest.importorskip("peft")
    from flowrl.adapters import LoRA
    from flowrl.context import Bindings, use_bindings
    from flowrl.runtime.worker import open_engine
    from flowrl.tiny import tiny_model

    for targets in ("all-linear", ("q_proj", "down_proj")):
        model = Model(tiny_model(), name="adapted", lora=LoRA(rank=3, target_modules=targets))  # type: ignore[arg-type]
        with use_bindings(Bindings(open_engine)):
            engine: Any = model.bound_engine()
            held = sum(p.numel() for _, p in engine.trained_parameters())
            engine.close()
        chosen = () if targets == "all-linear" else targets
        assert architecture_of(model).adapter_parameters(3, chosen) == held  # type: ignore[arg-type]


# -- where architectures come from ---------------------------------------------------------------------------------------


def test_a_configuration_may_be_a_mapping_a_file_a_folder_or_an_object(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    config.save_pretrained(tmp_path)
    expected = Architecture.from_config(config.to_dict())
    assert expected.qk_norm and expected.head_dim == 24
    for given in (config, tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert Architecture.from_config(given) == expected


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for given, says in (
        (tmp_path, "cannot be read"),
        (tmp_path / "list.json", "JSON object"),
        (tmp_path / "none.json", "No such file"),
        (7, "int '7'"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({}, "None"),
    ):
        with pytest.raises(FlowError, match=says):
            Architecture.from_config(given)


def test_all_that_is_wrong_with_a_configuration_is_said_at_once() -> None:
    config = {"model_type": "llama", "hidden_size": -1, "num_attention_heads": "4", "num_hidden_layers": 2}
    with pytest.raises(FlowError) as caught:
        Architecture.from_config(config)
    for part in ("hidden_size is -1", "num_attention_heads is '4'", "intermediate_size is missing", "vocab_size"):
        assert part in str(caught.value)
    uneven = tiny_config("llama").to_dict() | {"num_key_value_heads": 3}
    with pytest.raises(FlowError, match="4 heads cannot share 3"):
        Architecture.from_config(uneven)
    greedy = tiny_config("mixtral").to_dict() | {"num_experts_per_tok": 5}
    with pytest.raises(FlowError, match="5 of 4 experts"):
        Architecture.from_config(greedy)


#: Parameters in units of 10⁹ as the models' cards round them.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6.74,
    "meta-llama/Llama-2-70b-chat-hf": 69.0,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7,
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "deepseek-ai/DeepSeek-V2-Lite": 15.7,
    "deepseek-ai/DeepSeek-V3": 671.0,
    "google/gemma-2-9b-it": 9.24,
    "openai-community/gpt2": 0.124,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_well_known_models_have_their_published_size(name: str) -> None:
    found = known_architecture(name)
    assert found.num_parameters() / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


def test_every_known_configuration_can_be_read_and_says_its_size() -> None:
    for name in KNOWN_CONFIGS:
        said = [p for p in name.replace("8x", "").split("-") if p[:1].isdigit() and p[-1] in "bm"]
        architecture = known_architecture(name)
        if said and "mixtral" not in name and "v2-lite" not in name:
            size = float(said[0][:-1]) * (1e9 if said[0].endswith("b") else 1e6)
            assert architecture.num_parameters() == pytest.approx(size, rel=0.36), name
    with pytest.raises(FlowError, match=r"did you mean 'qwen3-8b'"):
        known_architecture("qwen3-8bb")
    assert known_config("somebody/else") is None


def test_a_model_is_read_from_what_there_is_and_nothing_heavy_is_imported(tmp_path: Path, monkeypatch: Any) -> None:
    config = tiny_config("mistral")
    config.save_pretrained(tmp_path / "folder")
    expected = Architecture.from_config(config)
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    config.save_pretrained(snapshot)
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert architecture_of(Model("some/model").frozen()) == expected
    assert architecture_of(RewardModel(tmp_path / "folder")) == expected
    assert architecture_of(Model(tiny_lm(config), name="live")) == expected
    assert architecture_of(ValueModel("Qwen/Qwen3-8B")) == known_architecture("qwen3-8b")
    code = f"""
import sys
from flowrl import Model
from flowrl.compiler.model_architecture import architecture_of
architecture_of(Model({str(tmp_path / "folder")!r})), architecture_of(Model("some/model"))
print([m for m in ("torch", "transformers", "numpy", "huggingface_hub") if m in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_a_model_of_which_nothing_is_known_says_what_was_tried(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FlowError) as caught:
        architecture_of(Model("nobody/nothing"))
    for part in ("no folder", str(tmp_path), "built in", "hf download nobody/nothing"):
        assert part in str(caught.value)
    with pytest.raises(FlowError, match=r"neither a config\.json nor one GGUF file"):
        architecture_of(Model(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(FlowError, match=r"Model\('here'\).*model_type, one of"):
        architecture_of(Model(tmp_path, name="here"))


def _gguf(path: Path, settings: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def setting(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        return struct.pack("<II", 4, value)

    data = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(settings))
    data += b"".join(text(k) + setting(v) for k, v in settings.items())
    for name, shape in shapes.items():
        data += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape)
        data += struct.pack("<IQ", 0, 0)
    path.write_bytes(data)


def test_the_head_of_a_gguf_file_is_enough(tmp_path: Path) -> None:
    sizes = dict(block_count=3, embedding_length=64, feed_forward_length=112, **{"attention.head_count": 4})
    settings: dict[str, Any] = {"general.architecture": "llama", "tokens": ["a", "bc"]}
    settings |= {f"llama.{name}": value for name, value in sizes.items()} | {"llama.attention.head_count_kv": 2}
    _gguf(tmp_path / "a.gguf", settings, {"token_embd.weight": (64, 96), "output.weight": (64, 96)})
    assert architecture_of(Model(tmp_path)) == Architecture.from_config(tiny_config("llama"))
    _gguf(tmp_path / "a.gguf", settings, {"token_embd.weight": (64, 96)})
    assert architecture_of(Model(tmp_path)).tied
    (tmp_path / "a.gguf").write_bytes(b"GGML" + bytes(40))
    with pytest.raises(FlowError, match="GGUF file"):
        architecture_of(Model(tmp_path))


def test_smollm2_in_its_package_is_what_the_table_says() -> None:
    from tests.smollm2 import smollm2_actor

    assert architecture_of(smollm2_actor()) == known_architecture("smollm2-135m")


def test_flops_of_a_forward_pass_are_products_and_pairs() -> None:
    """By hand, of one layer: two FLOP for each number of a matrix and token, and for each pair of tokens and head."""
    architecture = Architecture.from_config(tiny_config("llama", num_hidden_layers=1))
    hidden, kv, mlp = 64, 2 * 16, 112
    matrices = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp
    pairs = 4 * 2 * 2 * 16 * 10 * 5
    expected = 2 * 10 * matrices + pairs + 2 * 3 * hidden * 96
    assert architecture.flops_forward(10, 5, predicted=3) == expected
    assert math.isclose(architecture.head_flops(3, "value"), 2 * 3 * hidden)
