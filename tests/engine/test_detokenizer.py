import json
import random
import string
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from jax_paged.engine.text.detokenizer import Detokenizer
from jax_paged.engine.text.stop_strings import StopStrings
from jax_paged.engine.text.tokenizer import Tokenizer

TEXT = "The quick brown fox: naïve café 你好, 世界! 🙂 def f(x):\n    return x  # été\n"


def _save(backend, folder):
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(str(folder))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """GPT-2's kind: each byte is a token, so characters are split over tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    return _save(backend, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """Llama 2's kind: words carry a leading ▁, unknown characters fall back to byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *string.ascii_letters]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for word in ("▁the", "▁a", "▁fox", "▁is"):
        for i in range(2, len(word) + 1):
            vocab.setdefault(word[:i], len(vocab))
            merges.append((word[: i - 1], word[i - 1]))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _save(backend, tmp_path_factory.mktemp("sentencepiece"))


def stream(tokenizer, token_ids, prompt=(), stop=(), **settings):
    """Returns the parts that were visible after each token, and the stop string that was found."""
    detokenizer = Detokenizer(tokenizer, list(prompt), stop=StopStrings(stop) if stop else None, **settings)
    parts, shown = [], 0
    stop = None
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        parts.append(detokenizer.text[shown : detokenizer.num_visible])
        shown = max(shown, detokenizer.num_visible)
        if stop is not None:
            break
    stop = detokenizer.finish() or stop
    parts.append(detokenizer.text[shown:])
    assert "".join(parts) == detokenizer.text
    return parts, stop


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_bytes_decode_as_the_tokenizer_decodes_them_whole(byte_level, data):
    ids = data.draw(st.lists(st.integers(0, 329), max_size=60))
    prompt = byte_level.encode(data.draw(st.sampled_from(["", "Hi", "你"])))
    for skip in (True, False):
        parts, _ = stream(byte_level, ids, prompt, skip_special_tokens=skip)
        assert "".join(parts) == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_any_text_survives_sentencepiece_byte_fallback(sentencepiece, text):
    ids = sentencepiece.encode(text)
    parts, _ = stream(sentencepiece, ids)
    assert "".join(parts) == sentencepiece.decode(ids)


def test_a_character_is_shown_once_whole(byte_level):
    ids = byte_level.encode("ab🙂c")
    parts, _ = stream(byte_level, ids)
    assert "".join(parts) == "ab🙂c"
    assert not any("\ufffd" in part for part in parts)


def test_leading_space_depends_on_the_prompt(sentencepiece):
    the, fox = sentencepiece.encode("the fox")
    assert stream(sentencepiece, [the, fox])[0][:2] == ["the", " fox"]
    assert stream(sentencepiece, [the, fox], prompt=[fox])[0][:2] == [" the", " fox"]
    assert sentencepiece.token_text(the) == " the"


def test_incomplete_character_at_the_end_is_flushed(byte_level):
    ids = byte_level.encode("ok🙂")[:-1]
    parts, _ = stream(byte_level, ids)
    assert "".join(parts) == byte_level.decode(ids) == "ok\ufffd"


@pytest.mark.parametrize("stop", [["\ufffd"], ["k\ufffd"], ["x", "ok\ufffd"]])
def test_the_end_of_an_incomplete_character_is_no_stop_string(byte_level, stop):
    ids = byte_level.encode("ok🙂")[:-1]
    parts, found = stream(byte_level, ids, stop=stop)
    assert ("".join(parts), found) == ("ok\ufffd", None)


def test_what_was_held_back_beside_an_incomplete_character_can_hold_a_stop_string(tmp_path):
    """One token may be the end of one character and the start of another."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space, first = (pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0] for c in " 🙂")
    pieces = [*alphabet, space + first[0]]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = _save(backend, tmp_path)
    a, both = pieces.index("a"), len(alphabet)
    assert stream(tokenizer, [a, both]) == (["a", "", " \ufffd"], None)
    assert stream(tokenizer, [a, both], stop=[" "]) == (["a", "", ""], " ")
    assert stream(tokenizer, [a, both], stop=["a "]) == (["", "", ""], "a ")


def test_nothing_comes_after_a_stop_string_in_bytes_that_are_no_text(byte_level):
    ids = [*byte_level.encode("ab"), *byte_level.encode("🙂")[:1] * 6]
    parts, found = stream(byte_level, ids, stop=["b\ufffd"])
    assert ("".join(parts), found) == ("a", "b\ufffd")


def test_special_tokens_are_skipped_or_shown(byte_level):
    ids = [*byte_level.encode("a"), 2, *byte_level.encode("b")]
    assert "".join(stream(byte_level, ids)[0]) == "ab"
    assert "".join(stream(byte_level, ids, skip_special_tokens=False)[0]) == "a</s>b"


@pytest.mark.parametrize(
    ("text", "stop", "expected", "found"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["e t"], "on", "e t"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("one two", ["two", "one two"], "", "one two"),  # found at the same token: the first one counts
        ("aab", ["ab"], "a", "ab"),
        ("one", ["x", "oneone"], "one", None),
        ("好世界", ["世"], "好", "世"),
    ],
)
def test_stop_strings_across_tokens(byte_level, text, stop, expected, found):
    ids = [i for c in text for i in byte_level.encode(c)]  # one token per character, or fewer
    parts, stopped = stream(byte_level, ids, stop=stop)
    assert ("".join(parts), stopped) == (expected, found)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_string_is_ever_shown(byte_level, text, stop):
    ids = [i for c in text for i in byte_level.encode(c)]
    parts, found = stream(byte_level, ids, stop=stop)
    # The stop string that is complete first ends the text, and of these the one that starts first.
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not ends:
        assert (found, "".join(parts)) == (None, text)
        return
    _, start, first = min(ends)
    assert (found, "".join(parts)) == (first, text[:start])
    for i, part in enumerate(parts[:-1]):  # shown as early as possible: all but a possible start of a stop
        shown = "".join(parts[: i + 1])
        rest = text[len(shown) : i + 1]
        assert part is not None
        assert any(s.startswith(rest) for s in stop) or found


def test_stop_strings_count_after_min_tokens(byte_level):
    ids = [i for c in "xyxyx" for i in byte_level.encode(c)]
    assert stream(byte_level, ids, stop=["y"], min_tokens=2)[1] == "y"
    assert "".join(stream(byte_level, ids, stop=["y"], min_tokens=2)[0]) == "xyx"


def test_cost_of_a_token_does_not_grow(byte_level):
    rng = random.Random(0)
    garbage = [rng.randrange(3, 259) for _ in range(20000)]

    def seconds(ids):
        detokenizer = Detokenizer(byte_level, [5], stop=StopStrings(["<never>"]))
        start = time.perf_counter()
        for token_id in ids:
            detokenizer.append(token_id)
        return time.perf_counter() - start

    # A thousand tokens more cost as much at the end of a long text as at its start; 30 us is ten times
    # what a token takes, and far below what decoding the text anew takes.
    assert min(seconds(garbage) for _ in range(2)) / len(garbage) < 30e-6


def test_plain_tokenizer_file_equals_transformers(byte_level):
    for text in (TEXT, "<s>a</s>", "  two  spaces"):
        assert byte_level.encode(text) == byte_level.hf(text)["input_ids"]
        ids = byte_level.encode(text)
        assert byte_level.decode(ids) == byte_level.hf.decode(ids, skip_special_tokens=True)


def test_tokenizer_errors(byte_level, tmp_path):
    with pytest.raises(ValueError, match="`tokenizer` must be a tokenizer with a chat template, got "):
        byte_level.encode_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match=r"messages\[0\]"):
        byte_level.encode_chat([{"content": "hi"}])
    with pytest.raises(ValueError, match="can't be loaded"):
        Tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="Unicode"):
        byte_level.encode("\ud800")
