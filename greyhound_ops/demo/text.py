"""Real text that comes with every Python, cut into words.

The text is Python's language reference, which ``help()`` shows and which ships as
``pydoc_data.topics``, followed by the sources of the standard library: the reference alone has
some 6000 different words, too few for logits to matter. Either will do where a distribution leaves
the other out. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

# A word or a run of punctuation takes the space before it along, as in GPT-2's tokenizer: fewer
# tokens for the same text, and no token spent on the plain space. No character is lost.
_TOKEN = re.compile(r" ?\w+| ?[^\w\s]+|\s+")

# Left out of the library's sources: tests and other people's packages (large, not always
# installed), and tables, which are no text.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)

# Paragraphs that stay together, and which of these groups is held out.
_GROUP_PARAGRAPHS = 20
_VALIDATION_EVERY = 10

UNKNOWN = "<unk>"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenized text.

    Attributes:
        train: Token ids ``[tokens]``, int64.
        validation: Token ids ``[tokens]``, int64, of text that is not in ``train``.
        words: The vocabulary: ``words[i]`` is token ``i``, token 0 is `UNKNOWN`.
        vocab_size: ``len(words)`` rounded up to a multiple of 64.
        origin: Which text this is.
    """

    train: Tensor
    validation: Tensor
    words: tuple[str, ...]
    vocab_size: int
    origin: str


def load(max_vocab: int) -> Corpus:
    """Read and tokenize the text. The same Python gives the same corpus every time.

    Args:
        max_vocab: Cap on the vocabulary; rarer words become `UNKNOWN`.

    Returns:
        The corpus, nine tenths of it for training.

    Raises:
        RuntimeError: If this Python has neither text.
    """
    reference, sources = _language_reference(), _library_sources()
    origins = []
    if reference:
        origins.append("the Python language reference (pydoc_data.topics)")
    if sources:
        origins.append("the sources of the Python standard library")
    texts = reference + sources
    if not texts:
        raise RuntimeError(
            "no text to train on: this Python has neither pydoc_data nor the standard library's "
            "sources; use an installation that is not stripped"
        )

    train_text, validation_text = _split(texts)
    train_words = tokenize(train_text)
    # Words of the training text only: what is new in the validation text is unknown there too.
    common = Counter(train_words).most_common(max_vocab - 1)
    words = (UNKNOWN, *(word for word, _ in common))
    ids = {word: i for i, word in enumerate(words)}

    def encode(tokens: list[str]) -> Tensor:
        return torch.tensor([ids.get(token, 0) for token in tokens], dtype=torch.int64)

    return Corpus(
        train=encode(train_words),
        validation=encode(tokenize(validation_text)),
        words=words,
        vocab_size=-(-len(words) // 64) * 64,
        origin=" and ".join(origins),
    )


def tokenize(text: str) -> list[str]:
    """Cut text into words, runs of punctuation and runs of white space.

    Returns:
        The tokens, which joined give ``text`` again.
    """
    return _TOKEN.findall(text)


def _language_reference() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics)]


def _library_sources() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
    return texts


def _split(texts: list[str]) -> tuple[str, str]:
    # The reference holds many sections twice ("if" is also part of "compound") and sources repeat
    # licences: a paragraph counts once, or the validation text would be known from training.
    paragraphs = list(dict.fromkeys(part for text in texts for part in text.split("\n\n")))
    groups = [
        "\n\n".join(paragraphs[start : start + _GROUP_PARAGRAPHS])
        for start in range(0, len(paragraphs), _GROUP_PARAGRAPHS)
    ]
    # Spread over the whole text, not its end: topics are in alphabetical order.
    last = _VALIDATION_EVERY - 1
    train = [group for i, group in enumerate(groups) if i % _VALIDATION_EVERY != last]
    validation = [group for i, group in enumerate(groups) if i % _VALIDATION_EVERY == last]
    return "\n\n".join(train), "\n\n".join(validation)
