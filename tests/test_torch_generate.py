"""Continuations in torch programs: greedy as the Generator, drawn by temperature, top-k and top-p, or chosen by the user."""

from __future__ import annotations

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.torch import DecodeStep, Sampling
from tests.gpu import probe
from tests.test_torch import device, probe_step, tensor, tiny_step

__all__ = ["device"]  # a fixture
PROMPT = [3, 1, 4, 1, 5, 9, 2]


@pytest.fixture
def step(device: str) -> DecodeStep:
    return probe_step(device)


def test_greedy_is_what_the_kernel_means(step: DecodeStep, device: str) -> None:
    want, seen = probe.continuation(PROMPT, 9), []
    new = step.generate(PROMPT, 9, on_token=seen.append)
    assert new.tolist() == seen == want and new.dtype == torch.int64 and new.device == step.program.device
    assert step.generate(tensor(PROMPT, device), 9, sample=lambda logits: logits.argmax()).tolist() == want
    assert step.generate(tensor(PROMPT).numpy(), 9, temperature=3.0, top_k=1).tolist() == want
    assert step.generate(PROMPT, 1).tolist() == want[:1] and step.generate(PROMPT, 0).tolist() == []
    assert step.generate(PROMPT, 9, stop_ids={want[3]}).tolist() == want[:4]


def test_a_conversation_goes_on(device: str) -> None:
    step = tiny_step(device)
    first = step.generate(PROMPT, 3).tolist()
    rows = len(PROMPT) + 2
    more = step.generate([first[-1], 11, 12], 3, kv_len=rows)
    other = tiny_step(device)
    assert more.equal(other.generate([*PROMPT, *first, 11, 12], 3, cache=other.new_cache()))
    assert int(other.cache.count_nonzero()) == 0


def test_a_seed_is_a_text(device: str) -> None:
    step = tiny_step(device)

    def text(seed: int, **how: float | int) -> list[int]:
        generator = torch.Generator(step.program.device)
        generator.manual_seed(seed)
        return step.generate(PROMPT, 8, temperature=1.5, generator=generator, **how).tolist()

    assert text(1) == text(1) != text(2)
    assert text(1, top_k=1) == step.generate(PROMPT, 8).tolist()
    assert text(3, top_k=20, top_p=0.9) == text(3, top_k=20, top_p=0.9)


def test_what_is_drawn_has_its_probability() -> None:
    logits = tensor([2.0, 1.0, 0.0, -1.0, 0.9]).log_softmax(-1)
    full = logits.exp()
    cases = [({}, [0, 1, 2, 3, 4]), ({"top_k": 3}, [0, 1, 4]), ({"top_p": 0.6}, [0, 1]), ({"top_p": 0.01}, [0])]
    for how, kept in [
        *cases,
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),
        ({"top_k": 3, "top_p": 0.5}, [0]),
        ({"top_k": 9, "top_p": 1.0}, cases[0][1]),
    ]:
        sampling = Sampling(1.0, **how)
        want = torch.zeros(5).index_copy_(0, tensor(kept), full[kept])
        want /= want.sum()
        torch.testing.assert_close(sampling.probabilities(logits), want)
        drawn = sampling(logits.expand(40_000, 5), torch.Generator().manual_seed(7))
        torch.testing.assert_close(drawn.bincount(minlength=5) / 40_000, want, atol=0.01, rtol=0)
    torch.testing.assert_close(Sampling(0.5).probabilities(logits), (logits / 0.5).softmax(-1))
    assert Sampling(top_k=3)(logits).tolist() == 0, "temperature 0 is greedy"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "give a number above 0 and up to 1, or None"),
    ],
)
def test_sampling_that_means_nothing(how: dict[str, float], words: str) -> None:
    with pytest.raises(MegadslError) as caught:
        probe_step().generate(PROMPT, 2, **how)
    assert caught.value.code == "MK488" and words in str(caught.value) and "test_torch_generate.py:" in str(caught.value)


def test_bad_prompts_and_choices() -> None:
    step = probe_step()
    cases = [
        ("MK452", "empty", lambda: step.generate([], 3)),
        ("MK451", "token id 97 at index 1", lambda: step.generate([0, 97], 3)),
        ("MK450", "at most 40 more", lambda: step.generate([1] * 30, 12)),
        ("MK450", "38 are used", lambda: step.generate([1], 3, kv_len=38)),
        ("MK490", "sample gave int", lambda: step.generate([1], 3, sample=lambda logits: 5)),
        ("MK490", "torch.float32 of shape ()", lambda: step.generate([1], 3, sample=lambda logits: logits.max())),
        ("MK490", "torch.int64 of shape (2,)", lambda: step.generate([1], 3, sample=lambda logits: logits.topk(2).indices)),
    ]
    for code, words, call in cases:
        with pytest.raises(MegadslError) as caught:
            call()
        assert caught.value.code == code and words in str(caught.value) and "test_torch_generate.py:" in str(caught.value)
