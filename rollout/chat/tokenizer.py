"""The checkpoint's tokenizer, for what the worker itself needs: text as data, and the bytes of each id."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from engine.request import IntArray
from rollout.environments.base import Ids

FILE = "tokenizer.json"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
"""How SentencePiece writes a space."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a text. frame: spellings of added tokens in it stand for those tokens; else they are text."""

    text: str
    frame: bool = False


class Encoded:
    """What pieces were encoded to. The pieces of a token are looked up only when somebody asks: that takes as long as
    the encoding, and holds the interpreter all the while.
    """

    def __init__(self, encoding: Encoding, texts: Sequence[str]) -> None:
        self._encoding, self._texts = encoding, texts
        self.ids: IntArray = np.array(encoding.ids, np.int32)
        """int32[n]."""

    def pieces(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """int64[n] each: the pieces that hold the first and the last character of each token."""
        ends = np.cumsum([len(text) for text in self._texts])
        spans = np.array(self._encoding.offsets, np.int64).reshape(-1, 2)
        last = np.maximum(spans[:, 1] - 1, spans[:, 0])
        first, final = (np.searchsorted(ends[:-1], at, side="right") for at in (spans[:, 0], last))
        return first, final


class Tokenizer:
    """Implements `TextCodec`. hash: "sha256:hex" of tokenizer.json.

    control: content to id of its added tokens; pure white space is left out, for that is text. reserved: those that
    are marked special. The others (Qwen's `<think>`, `<tool_call>`) are words that a model says, not its frame.
    """

    def __init__(self, source: bytes) -> None:
        """source: content of a tokenizer.json. Raises ValueError where it is not one."""
        try:
            spec: dict[str, Any] = json.loads(source)
            self._whole = FastTokenizer.from_str(source.decode())
            added = spec.get("added_tokens") or ()
            self._added = {token["content"]: int(token["id"]) for token in added}
            self.control = {text: index for text, index in self._added.items() if text.strip()}
            self.reserved = frozenset(token["content"] for token in added if token.get("special"))
            secret = secrets.token_hex(16)
            self._hidden = {content: f"{secret} {content}" for content in self.control}
            self._spelled = spellings(self.control)
            self._plain = FastTokenizer.from_str(json.dumps(_without_control(spec, self._hidden)))
            self._byte_level = "ByteLevel" in _types([spec.get("decoder"), spec.get("pre_tokenizer")])
        except Exception as error:
            raise ValueError(f"not a usable {FILE}: {error}") from error
        self.hash = "sha256:" + hashlib.sha256(source).hexdigest()

    @classmethod
    def load(cls, checkpoint: str | Path) -> Tokenizer | None:
        """Of a checkpoint directory; None when it has none. Raises ValueError, naming the file."""
        path = Path(checkpoint) / FILE
        try:
            source = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return cls(source)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def encode(self, text: str) -> IntArray:
        """int32[n]. The text is data: an added token (`<|im_end|>`, `<think>`) in it is spelled out, never produced."""
        return np.array(self._encoded(text).ids, np.int32)

    def encode_pieces(self, pieces: Sequence[Piece]) -> Encoded:
        """The pieces as one text: where none but frames spell an added token, its ids are the ordinary encoding's.

        An added token begins and ends in one frame. Everything between two of them is encoded together, so that a
        piece's end does not show in the ids.
        """
        texts = [self._spelled.sub(self._hide, piece.text) if piece.frame else piece.text for piece in pieces]
        return Encoded(self._encoded("".join(texts)), texts)

    def _encoded(self, text: str) -> Any:
        try:
            # Of a single text the library holds the interpreter, a second for each MiB; of a batch it does not.
            return self._plain.encode_batch([text], add_special_tokens=False)[0]
        except TypeError:
            lone = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
            if lone is None:
                raise
            raise ValueError(f"no text can be encoded that holds a lone surrogate, {lone!a}") from None

    def _hide(self, spelled: re.Match[str]) -> str:
        return self._hidden[spelled[0]]

    def decode(self, ids: Ids) -> str:
        """Added tokens are written as they are; ids that the tokenizer does not have (a padded head's) are ''."""
        text: str = self._whole.decode_batch([np.asarray(ids).tolist()], skip_special_tokens=False)[0]
        return text

    def special(self, token: str) -> int:
        """The id of an added token. Raises KeyError."""
        return self._added[token]

    def token_bytes(self, size: int) -> tuple[bytes, ...]:
        """What each id in [0, size) adds to the text, as UTF-8: a token may hold a part of a character.

        Byte-level BPE is undone through its alphabet, SentencePiece through its space mark and its byte tokens;
        b"" for ids that the tokenizer does not have.
        """
        alphabet = _byte_alphabet()
        table = [b""] * size
        for token, index in self._whole.get_vocab(with_added_tokens=True).items():
            if index >= size:
                continue
            if token in self._added:
                table[index] = token.encode()
            elif self._byte_level:
                table[index] = _byte_level(token, alphabet)
            else:
                table[index] = _sentence_piece(token)
        return tuple(table)


def spellings(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds each of `tokens` in a text, the longest one where several begin; nothing where there are none.

    What they begin with alike is looked at once: with thousands of them (`<unused0>` and so on) a message that repeats
    such a beginning would otherwise hold the interpreter for minutes.
    """
    tree: dict[str, Any] = {}
    for token in filter(None, tokens):
        node = tree
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternatives(tree) or r"(?!)")


def _alternatives(tree: Mapping[str, Any]) -> str:
    """tree: what may come next, by its first character; "" where a token ends."""
    longer = []
    for start, rest in tree.items():
        run = start
        while len(rest) == 1 and "" not in rest:  # by calls, a long token would be too deep
            ((character, rest),) = rest.items()
            run += character
        if run:
            longer.append(re.escape(run) + _alternatives(rest))
    if not longer:
        return ""
    pattern = longer[0] if len(longer) == 1 else f"(?:{'|'.join(longer)})"
    return f"(?:{pattern})?" if "" in tree else pattern


def _without_control(spec: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The same tokenizer in which no text is an added token, except pure white space, which is text.

    names: what the others are called in it: nobody can spell that, since nobody knows it. To leave them out would not
    do: the ids of the others would move up, and some models (Unigram) hold `</s>` as an ordinary piece too.
    """
    added = spec.get("added_tokens") or ()
    control = names.keys()

    def hidden(piece: str) -> str:
        return names.get(piece, piece)

    model = dict(spec["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {hidden(piece): index for piece, index in vocab.items()}
    else:
        model["vocab"] = [[hidden(piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = hidden(model["unk_token"])
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if control.isdisjoint((*pair, "".join(pair)))]
    renamed = [{**token, "content": hidden(token["content"])} for token in added]
    return {
        **spec,
        "model": model,
        "added_tokens": renamed,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _types(node: Any) -> set[str]:
    """Every "type" in the decoder's and pre-tokenizer's description."""
    if isinstance(node, list):
        return set().union(*map(_types, node))
    if isinstance(node, dict):
        return set().union({node["type"]} if isinstance(node.get("type"), str) else (), *map(_types, node.values()))
    return set()


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE (GPT-2) writes each byte.

    Printable bytes stand for themselves; the others, in order, for the characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace(SPACE, " ").encode()
