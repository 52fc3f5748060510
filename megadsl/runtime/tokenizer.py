"""The tokenizer that a GGUF file carries, byte-level BPE, or that stands beside a checkpoint as tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megadsl.diagnostics import declare, error
from megadsl.dsl.registry import read_json
from megadsl.runtime.gguf import PACKAGE_MISSING, GgufFile

try:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
except ModuleNotFoundError:
    tokenizers = None  # type: ignore[assignment]

TOKENIZER_KIND = declare(
    "MK410",
    "{path} has a tokenizer of kind {kind!r}, pre-tokenizer {pre!r}",
    "pass token ids instead of text; kind gpt2 with one of these pre-tokenizers is known: {known}",
)
TOKENIZER_BROKEN = declare(
    "MK411", "the tokenizer in {path} is inconsistent: {why}", "fetch the file again, or pass token ids instead of text"
)

# pre-tokenizer name -> whether each digit is a word of its own
_DIGITS_APART = {"smollm": True, "gpt-2": False}

_CONTROL = 3  # token type: never produced from text by merges, matched whole


class Tokenizer:
    """Text to ids and back."""

    def __init__(self, inner: tokenizers.Tokenizer, bos: int | None, stop_ids: frozenset[int], template: bool = False) -> None:
        self._inner = inner
        self._template = template  # whether the tokenizer itself puts control tokens around a text
        self.bos = bos
        self.stop_ids = stop_ids

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; control tokens written out (``<|im_start|>``) are matched whole."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=self._template).ids
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def decode(self, ids: Sequence[int], skip_control: bool = True) -> str:
        """The text of ``ids``; incomplete UTF-8 shows as U+FFFD. Control tokens are left out unless ``skip_control`` is False."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_control)
        return text

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())


def tokenizer_known(file: GgufFile) -> bool:
    """Whether :func:`tokenizer_of` knows the kind of tokenizer in the checkpoint."""
    return file.metadata.get("tokenizer.ggml.model") == "gpt2" and file.metadata.get("tokenizer.ggml.pre") in _DIGITS_APART


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """The tokenizer in a checkpoint's metadata; MK410 for a kind that is not known, MK411 for a broken one."""
    if tokenizers is None:
        raise error(PACKAGE_MISSING, what="reading a tokenizer", package="tokenizers")
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if not tokenizer_known(file):
        raise error(TOKENIZER_KIND, path=file.path, kind=kind, pre=pre, known=", ".join(_DIGITS_APART))
    metadata = file.metadata
    bos = metadata.get("tokenizer.ggml.bos_token_id") if metadata.get("tokenizer.ggml.add_bos_token") else None
    return Tokenizer(_build(file, _DIGITS_APART[str(pre)]), bos, _stop_ids(metadata))


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory; None when there is no tokenizer.json, MK411 for a broken one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    if tokenizers is None:
        raise error(PACKAGE_MISSING, what="reading a tokenizer", package="tokenizers")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as bad:  # the package raises bare Exception for all it cannot read
        raise error(TOKENIZER_BROKEN, path=path, why=str(bad)) from bad
    settings, model, generation = (_optional(folder / f"{name}.json") for name in ("tokenizer_config", "config", "generation_config"))
    ends = [source.get("eos_token_id") for source in (model, generation)]
    stops = {token for end in ends for token in (end if isinstance(end, list) else [end]) if isinstance(token, int)}
    stops |= {token for token in (_id_of(inner, settings.get("eos_token")),) if token is not None}
    bos = _id_of(inner, settings.get("bos_token")) if settings.get("add_bos_token") else None
    return Tokenizer(inner, bos, frozenset(stops), template=settings.get("add_bos_token") is not False)


def _optional(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.is_file() else {}


def _id_of(inner: tokenizers.Tokenizer, token: object) -> int | None:
    """The id of a token as tokenizer_config.json gives it: its text, or an object with it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    found: int | None = inner.token_to_id(text) if isinstance(text, str) else None
    return found


def _build(file: GgufFile, digits_apart: bool) -> tokenizers.Tokenizer:
    tokens: list[str] = file.metadata.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    merges = [tuple(m.split(" ")) for m in file.metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(kinds) != len(tokens) or any(len(m) != 2 for m in merges):
        raise error(TOKENIZER_BROKEN, path=file.path, why=f"{len(tokens)} tokens, {len(kinds)} types, {len(merges)} merges")
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as bad:  # the package raises bare Exception for a merge of unknown tokens
        raise error(TOKENIZER_BROKEN, path=file.path, why=str(bad)) from bad
    bytes_to_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = [pre_tokenizers.Digits(individual_digits=True), bytes_to_words] if digits_apart else [bytes_to_words]
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL])
    return inner


def _stop_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end a text: the file's end-of-sequence tokens, and the end-of-text control token."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    stops = {metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")}
    stops |= {i for i, token in enumerate(tokens) if token == "<|endoftext|>"}
    return frozenset(s for s in stops if s is not None)
