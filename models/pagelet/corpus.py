"""The tokenizer of pagelet, and its training batches."""

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jax_paged.models.pagelet.dialogue import Dialogue, read_topics

VOCAB_SIZE = 2048
END_OF_TEXT, END = "<|endoftext|>", "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def library_texts() -> Iterator[str]:
    """Yields the docstrings of Python's standard library, and its short documented definitions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "__phello__"}
    for path in sorted(root.rglob("*.py")):
        if skipped & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node)
            if not docstring:
                continue
            yield docstring
            code = None if isinstance(node, ast.Module) else ast.get_source_segment(source, node, padded=True)
            if code and len(code) < 2000:
                yield textwrap.dedent(code)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer in which every digit is a separate token.

    Args:
        texts: The texts of the standard library.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    chat = [text for topic in read_topics() for text in (*topic.written, *[topic.answer] * 5)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts + chat * 5, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


class Corpus:
    """Source of training batches: conversations, and excerpts from the texts of the standard library.

    Args:
        tokenizer: The tokenizer.
        texts: The texts of the standard library.
        seed: Random seed. A batch depends only on the seed and on the step number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> None:
        self.bpe: Any = tokenizer.backend_tokenizer
        self.seed = seed
        self.topics = read_topics()
        self.ids = {token: self.bpe.token_to_id(token) for token in SPECIAL_TOKENS}
        texts = random.Random(seed).sample(texts, len(texts))
        end = [self.ids[END_OF_TEXT]]
        self.library = np.concatenate([encoding.ids + end for encoding in self.bpe.encode_batch(texts)])

    def batch(
        self, step: int, rows: int, row_len: int, chat_share: float, library_weight: float, sums_share: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the batch of a training step.

        Args:
            step: Number of the step.
            rows: Number of rows in the batch.
            row_len: Number of predicted tokens per row.
            chat_share: Share of rows that are conversations.
            library_weight: Loss weight of a token in the standard library's texts. The tokens of the
                assistant have weight 1.
            sums_share: Share of conversations that consist of arithmetic only.

        Returns:
            int32 [rows, row_len + 1], the tokens; float32 [rows, row_len], the loss weights, which in
            conversations are 0 except for the tokens of the assistant; and bool [rows], whether a row is a
            conversation.
        """
        rng = random.Random(f"{self.seed}.{step}")
        dialogue = Dialogue(self.topics, rng, sums_share)
        tokens = np.full((rows, row_len + 1), self.ids[END_OF_TEXT], np.int32)
        weights = np.zeros((rows, row_len), np.float32)
        is_chat = np.arange(rows) < rows * chat_share
        for row in range(rows):
            if is_chat[row]:
                ids, learned = self.conversation(dialogue, row_len + 1)
                tokens[row, : len(ids)] = ids
                weights[row, : len(ids) - 1] = learned[1:]
            else:
                start = rng.randrange(len(self.library) - row_len)
                tokens[row] = self.library[start : start + row_len + 1]
                weights[row] = library_weight
        return tokens, weights, is_chat

    def conversation(self, dialogue: Dialogue, limit: int) -> tuple[list[int], list[bool]]:
        """Returns the token ids of a conversation, and whether each token is learned.

        Args:
            dialogue: Source of the turns. A turn that does not fit is skipped; the conversation ends after
                four such turns.
            limit: The maximum number of tokens.
        """
        ids: list[int] = []
        learned: list[bool] = []
        misses = 0
        for messages in dialogue.conversation():
            num_before = len(ids)
            for message in messages:
                text = [*self.bpe.encode(message["content"]).ids, self.ids[END]]
                ids += [self.ids[f"<|{message['role']}|>"], *text]
                learned += [False, *[message["role"] == "assistant"] * len(text)]
            if len(ids) > limit:
                del ids[num_before:], learned[num_before:]
                misses += 1
                if misses == 4:
                    return ids, learned
        raise AssertionError("a dialogue must not run out of turns")
