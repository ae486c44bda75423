"""Tokenizers from lists of pieces: sentencepiece's byte pairs and unigrams, and tiktoken's byte pairs by rank."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxspec.errors import UserError, first_line

DIGIT_TRIPLES = (  # how LLaMA 3 splits texts before it merges bytes
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SINGLE_DIGITS = DIGIT_TRIPLES.replace("{1,3}", "")  # how Qwen does
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of pieces
_UNIGRAM, _BPE = 1, 2  # types of models


def split_by(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    """Split text into pieces that match a pattern, and these into bytes."""
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


def all_merges(ids: Mapping[str, int], rank: Callable[[str], float] | None = None) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, those of the lowest rank first; without `rank`, of the lowest id."""
    merges = []
    for token, i in ids.items():
        splits = [(token[:n], token[n:]) for n in range(1, len(token))]
        found = [(a, b) for a, b in splits if a in ids and b in ids]
        merges += [(rank(token) if rank else i, min(ids[a], ids[b]), (a, b)) for a, b in found]
    return [pair for *_, pair in sorted(merges)]


def as_sentencepiece(model: models.Model, normal: Sequence[normalizers.Normalizer], prefix: bool) -> Tokenizer:
    """A tokenizer whose pieces hold spaces as ▁; with `prefix`, one that begins every text with a space."""
    tokenizer = Tokenizer(model)
    first = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*normal, *first, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps if prefix else steps[:-1])
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What a `tokenizer.model` of sentencepiece says.

    Attributes:
      names: of the pieces, by id.
      types: of the pieces: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
      scores: of the pieces: log-probabilities of unigrams; of byte pairs, higher ones are merged first.
      model: 1 unigrams, 2 byte pairs.
      unknown: id of the unknown piece.
      byte_fallback: what no piece covers is written in bytes.
      prefix: a space is put before every text.
      squeezed: spaces at both ends are dropped, and several are one.
      charsmap: sentencepiece's compiled rules that normalise characters; empty: none.
    """

    names: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    model: int
    unknown: int
    byte_fallback: bool
    prefix: bool
    squeezed: bool
    charsmap: bytes

    @classmethod
    def read(cls, file: Path) -> Pieces:
        """Read a `tokenizer.model`. Raises UserError for what is none, or is of words or characters."""
        try:
            from sentencepiece import sentencepiece_model_pb2
        except ImportError as error:
            raise UserError(
                f"{file}: reading it needs {error.name}; install it with: pip install sentencepiece protobuf"
            ) from None
        proto = sentencepiece_model_pb2.ModelProto()
        try:
            proto.ParseFromString(file.read_bytes())
        except Exception as error:  # protobuf's own kind
            raise UserError(f"{file} is not a model of sentencepiece: {first_line(error)}") from None
        how, normal = proto.trainer_spec, proto.normalizer_spec
        if not proto.pieces or how.model_type not in (_UNIGRAM, _BPE):
            raise UserError(f"{file} is not a model of sentencepiece with byte pairs or unigrams")
        return cls(
            names=tuple(piece.piece for piece in proto.pieces),
            types=tuple(piece.type for piece in proto.pieces),
            scores=tuple(piece.score for piece in proto.pieces),
            model=how.model_type,
            unknown=how.unk_id,
            byte_fallback=how.byte_fallback,
            prefix=normal.add_dummy_prefix,
            squeezed=normal.remove_extra_whitespaces,
            charsmap=normal.precompiled_charsmap,
        )

    def tokenizer(self, added: Mapping[int, AddedToken] | None = None) -> Tokenizer:
        """The tokenizer, control pieces special in it.

        Args:
          added: tokens by id that take the place of pieces, or come behind them.

        Raises:
          UserError: ids of added tokens leave a gap behind the pieces.
        """
        added, names = added or {}, list(self.names)
        for i in sorted(added):
            if i > len(names):
                raise UserError(f"added token {added[i].content!r} has id {i}, and there are {len(names)} tokens below")
            names[i : i + 1] = [added[i].content]
        ids = {name: i for i, name in enumerate(names)}
        tokenizer = as_sentencepiece(self._model(ids, names), self._normal(), self.prefix)
        for i, name in enumerate(names):
            kind = self.types[i] if i < len(self.types) else _CONTROL
            if i in added or kind in (_CONTROL, _UNKNOWN):
                token = added.get(i, AddedToken(name, special=True, normalized=False))
                (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
            elif kind == _USER_DEFINED:  # found where the space before the text already is
                tokenizer.add_tokens([AddedToken(name, normalized=not self.prefix)])
        return tokenizer

    def _model(self, ids: dict[str, int], names: list[str]) -> models.Model:
        if self.model == _UNIGRAM:
            lowest = min(self.scores)
            scores = [*self.scores, *[lowest] * (len(names) - len(self.scores))]
            pairs = list(zip(names, scores, strict=True))
            return models.Unigram(pairs, unk_id=self.unknown, byte_fallback=self.byte_fallback)
        normal = {name: ids[name] for name, kind in zip(self.names, self.types, strict=True) if kind == _NORMAL}
        normal = {name: i for name, i in normal.items() if names[i] == name}
        merges = all_merges(normal, lambda token: -self.scores[normal[token]])
        unknown = names[self.unknown]
        return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=self.byte_fallback)

    def _normal(self) -> list[normalizers.Normalizer]:
        rules = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.squeezed:
            rules += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        return rules


def read_tiktoken(file: Path) -> dict[bytes, int]:
    """Tokens and their ranks of a tiktoken file: in each line a token in base64, and its rank.

    Raises UserError for another file, or ranks that are not those from 0 on.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise UserError(f"{file}: line {len(ranks) + 1} must be a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise UserError(f"{file}: the ranks must be those from 0 on, each once")
    return ranks


def ranked_bytes(ranks: Mapping[bytes, int], pattern: str, special: Iterable[str]) -> Tokenizer:
    """A tokenizer of tiktoken: pieces that match a pattern, in which the pair of the lowest rank is merged first.

    Special tokens come behind the others.
    """
    letters = byte_letters()
    ids = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(ids, all_merges(ids), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split_by(pattern))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: its own where it is printed, else one from 256 on."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]
