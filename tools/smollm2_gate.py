"""SmolLM2-135M-Instruct on a GPU against the fp32 oracle: greedy text, and teacher-forced logits beside torch bf16.

python tools/smollm2_gate.py [--weights FILE.gguf] --out docs/measurements/smollm2.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from megadsl.driver import compile_model
from megadsl.reference import EagerModel, ReferenceModel, gate
from megadsl.runtime.generate import Generator
from megadsl.runtime.gguf import demo_weights
from megadsl.runtime.weights import needed, open_weights

MODEL = "smollm2-135m"
PROMPTS = ("The capital of France is", "Water boils at", "def fibonacci(n):")
NEW_TOKENS = 32
MARGIN = 0.2


def compare_text(generator: Generator, oracle: ReferenceModel, prompt: str) -> dict[str, Any]:
    """Greedy ids of the kernel; each must be the oracle's after the same ids wherever the oracle's choice is clear."""
    ours = generator.generate(prompt, NEW_TOKENS, stop_at_end=False)
    oracle.kv_len = 0
    logits = oracle.step(ours.prompt_ids)[-1:]
    wrong, unclear = [], 0
    for index, token in enumerate(ours.ids):
        top = logits[-1].topk(2)
        if float(top.values[0] - top.values[1]) <= MARGIN:
            unclear += 1
        elif int(top.indices[0]) != token:
            wrong.append(index)
        logits = oracle.step([token])
    return {"prompt": prompt, "text": ours.text, "ids": ours.ids, "wrong": wrong, "unclear": unclear, "ms_per_token": ours.ms_per_token}


def compare_logits(generator: Generator, oracle: ReferenceModel, bf16: EagerModel, ids: list[int]) -> dict[str, Any]:
    """The fidelity gate over teacher-forced ids, one token a step."""
    generator.reset()
    oracle.kv_len = bf16.kv_len = 0
    rows = [(generator.step([i])[-1].clone(), bf16.step([i])[-1], oracle.step([i])[-1]) for i in ids]
    ours, eager, exact = (torch.stack(part) for part in zip(*rows, strict=True))
    verdict = gate(ours, eager, exact, margin=MARGIN)
    return {"passed": verdict.passed, "ours": vars(verdict.ours), "bf16": vars(verdict.bf16), "tokens": len(ids), "verdict": str(verdict)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    compiled = compile_model(MODEL, tokens=args.tokens)
    source = open_weights(args.weights or demo_weights())
    weights = {name: source.load(name).cuda() for name in needed(compiled.manifest)}
    generator = Generator(compiled, source, "cuda", progress=False)
    oracle = ReferenceModel(compiled.graph, weights, 2048, "fp32", "cuda")
    texts = [compare_text(generator, oracle, prompt) for prompt in PROMPTS]
    bf16 = EagerModel(compiled.graph, weights, 2048, "cuda")
    forced = [token for text in texts for token in text["ids"]]
    logits = compare_logits(generator, oracle, bf16, forced)
    result = {"model": MODEL, "device": torch.cuda.get_device_name(), "texts": texts, "logits": logits}
    for text in texts:
        counts = f"{len(text['wrong'])} wrong, {text['unclear']} unclear, {text['ms_per_token']:.3f} ms per token"
        print(f"{text['prompt']!r} -> {text['text']!r}: {counts}")
    print(logits["verdict"])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
