"""Which modules are sharded each for itself: what can be named, and what is said of what cannot.

One rank says the same as several, since it looks at the module alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flowrl.compiler.strategy import Strategy
from flowrl.context import Bindings
from flowrl.errors import ModelError
from flowrl.models import Model
from flowrl.runtime.engines.transformers_layers import layers_of
from flowrl.runtime.worker import open_engine
from tests.tiny import tiny_folder, tiny_model


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny_model()


@pytest.mark.parametrize(
    ("names", "per_layer"),
    [
        ((), 1),
        (("LlamaDecoderLayer",), 1),
        (("LlamaMLP",), 1),
        (("LlamaMLP", "LlamaAttention"), 2),
        (("LlamaMLP", "LlamaMLP"), 1),
    ],
)
def test_layers(names: tuple[str, ...], per_layer: int, module: Any) -> None:
    layers = layers_of(module, names, "tiny")
    assert len(layers) == len({id(layer) for layer in layers}) == per_layer * len(module.model.layers)
    assert {type(layer).__name__ for layer in layers} == set(names or ("LlamaDecoderLayer",))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("Linear",), "Linear: 'lm_head' is the head, whose weights are read at both ends of a pass"),
        (("Embedding",), "Embedding: 'model.embed_tokens' is the embedding, whose weights"),
        (("LlamaModel",), "LlamaModel: 'model' contains the embedding"),
        (("LlamaForCausalLM",), "LlamaForCausalLM: the whole model contains the embedding"),
        (("ModuleList",), "ModuleList: 'model.layers' contains all layers, which would then be whole at once"),
        (("SiLUActivation",), "SiLUActivation: 'model.layers.0.mlp.act_fn' has no weights"),
        (("LlamaMLP", "LlamaDecoderLayer"), "LlamaMLP lies within LlamaDecoderLayer; expected one of them"),
        (("Linear", "LlamaModel"), "Linear: .*; LlamaModel: "),
    ],
)
def test_classes_that_cannot_be_named(names: tuple[str, ...], why: str, module: Any) -> None:
    """All of them, why, and the classes that can, those with most weights first."""
    with pytest.raises(ModelError, match=f"Modules of tiny cannot be .* Received {why}") as error:
        layers_of(module, names, "tiny")
    assert "such as LlamaDecoderLayer, LlamaMLP, LlamaAttention, LlamaRMSNorm; none within another" in str(error.value)


class Half(nn.Linear):
    pass


class Pair(nn.Module):
    """Two layers whose weights may be one, or which may lie in a list, or within each other."""

    def __init__(self, *, tied: bool = False, listed: bool = False, within: bool = False) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(3, 2), Half(2, 2), Half(2, 2)
        if tied:
            self.second.weight = self.first.weight
        if within:
            self.first.inner = self.second
        if listed:
            self.parts = nn.ModuleDict({"third": Half(2, 2)})

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def test_weights_that_are_shared_with_others() -> None:
    assert len(layers_of(Pair(), ["Half"], "pair")) == 2
    with pytest.raises(ModelError, match=r"Half: 'first' shares weights with 'second.weight', which is outside of it"):
        layers_of(Pair(tied=True), ["Half"], "pair")


def test_modules_within_others_of_their_class() -> None:
    with pytest.raises(ModelError, match=r"such as none of this model.* Half: 'first.inner' lies within another one"):
        layers_of(Pair(within=True), ["Half"], "pair")


def test_modules_without_a_forward_pass() -> None:
    with pytest.raises(ModelError, match=r"such as Half; .* ModuleDict: 'parts' has no forward pass of its own"):
        layers_of(Pair(listed=True), ["ModuleDict"], "pair")


def test_an_engine_says_it_when_it_opens(tmp_path: Path) -> None:
    """Also on one rank, where nothing is sharded; and what is no setting at all is an error, too."""
    folder = tiny_folder(tmp_path)

    def opened(**settings: Any) -> Any:
        bindings = Bindings(open_engine, strategies={"tiny": Strategy(**settings)})
        return open_engine(Model(folder, name="tiny", device="cpu"), bindings)

    with pytest.raises(ModelError, match=r"tiny has no module of class Nope\. .* such as LlamaDecoderLayer, LlamaMLP"):
        opened(shard_layers=("Nope", "LlamaMLP"))
    with pytest.raises(ModelError, match="Linear: 'lm_head' is the head"):
        opened(shard_layers=("Linear",))
    with pytest.raises(ModelError, match=r"tiny: tensor_parallel is 1\.0; expected .*; shard_layers is 'A'; expected"):
        opened(tensor_parallel=1.0, shard_layers="A")
    opened(shard_layers=["LlamaMLP"]).close()
