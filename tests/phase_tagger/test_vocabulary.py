"""Vocabularies: ids, offsets, bytes, pieces; and the way from characters to tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from agentkv_serve.phase_tagger import Label, TokenizerError, Vocabulary, vocabulary
from agentkv_serve.phase_tagger.labels import check_runs, labels_of
from agentkv_serve.phase_tagger.regions import CharRuns

from .tiny import tiny_tokenizer

TEXTS = st.lists(
    st.one_of(st.text(max_size=12), st.sampled_from(["<|im_end|>", "<|im_start|>", "\n", "🙂"])), max_size=12
)


def sentence_piece() -> Tokenizer:
    """▁ for spaces and bytes as <0xNN>, as in Gemma's vocabulary."""
    words = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(words, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<eos>", normalized=False)])
    return tokenizer


@settings(max_examples=60, deadline=None)
@given(parts=TEXTS)
def test_ids_are_the_tokenizers_own_however_the_text_is_cut(tiny: Vocabulary, parts: list[str]) -> None:
    text = "".join(parts)
    patch = pytest.MonkeyPatch()
    patch.setattr(vocabulary, "PIECE", 5)
    ids, starts = tiny.encode(text)
    patch.undo()
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert ids.tolist() == tiny.tokenizer.encode(clean, add_special_tokens=False).ids
    assert ids.dtype == starts.dtype == np.int32 and (np.diff(starts) >= 0).all()


def test_bytes_of_every_token(tiny: Vocabulary) -> None:
    table = tiny.token_bytes()
    text = "Hello <tool_call> é 漢 🙂\r\n\t<|im_end|>"
    assert b"".join(table[number] for number in tiny.encode(text)[0]) == text.encode()
    assert len(table) == tiny.size and table[tiny.id_of("<|im_end|>") or 0] == b"<|im_end|>"


def test_sentence_piece_vocabularies() -> None:
    words = Vocabulary(sentence_piece())
    ids, starts = words.encode("a a🙂<eos>")
    assert b"".join(words.token_bytes()[number] for number in ids) == "a a🙂<eos>".encode()
    assert starts.tolist() == [0, 1, 3, 3, 3, 3, 4]
    assert words.decode(ids) == "a a🙂<eos>"


def test_half_a_surrogate_pair_is_replaced(tiny: Vocabulary) -> None:
    assert tiny.decode(tiny.encode("a\udcffb")[0]) == "a\ufffdb"


def test_control_tokens(tiny: Vocabulary) -> None:
    assert tiny.id_of("Hello") is None and tiny.id_of("<|im_end|>") in tiny.special
    assert [match[0] for match in tiny.control.finditer("a<|im_end|>b<|im_start|>")] == ["<|im_end|>", "<|im_start|>"]
    assert tiny.is_added.sum() == 3


def test_a_wrapped_tokenizer_is_left_as_it_was() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(2)
    assert len(Vocabulary(tokenizer).encode("a b c d e f g")[0]) > 2
    assert len(tokenizer.encode("a b c d e f g").ids) == 2


@pytest.mark.parametrize("source", [None, 5, "no/such/folder", Path("/dev/null/x")])
def test_what_is_no_tokenizer(source: object) -> None:
    with pytest.raises(TokenizerError):
        Vocabulary(source)


def test_folder_file_and_fast_tokenizers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = tiny_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    sizes = {Vocabulary(source).size for source in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path), wrapped)}
    assert sizes == {tokenizer.get_vocab_size()}


LETTERS = {"G": Label.GLUE, "I": Label.INPUT, "T": Label.TOOL}


@pytest.mark.parametrize(
    ("characters", "starts", "expected"),
    [
        ("GGII", [0, 1, 2, 3], "GGII"),
        ("GGII", [0, 2], "GI"),
        ("GGII", [0, 1, 3], "GII"),  # straddles glue and a field: the field's
        ("IGG", [0, 2], "IG"),
        ("IIGT", [0, 1], "II"),  # the first field that it covers
        ("GITG", [0, 3], "IG"),
        ("GIIG", [0, 1, 1, 1, 2], "GIIII"),  # byte pieces of one character share its label
        ("GGT", [0, 0, 0], "TTT"),  # byte pieces of a character that runs into a field
        ("GGG", [0, 1], "GG"),
    ],
)
def test_from_characters_to_tokens(characters: str, starts: list[int], expected: str) -> None:
    runs = CharRuns.of(np.array([LETTERS[letter] for letter in characters], np.int8))
    found = runs.tokens(np.array(starts, np.int32), len(characters))
    assert labels_of(found) == [LETTERS[letter] for letter in expected]
    check_runs(found, len(starts))


@given(st.lists(st.sampled_from("GIT"), min_size=1, max_size=12), st.data())
def test_a_token_has_the_label_of_its_first_character_that_is_not_glue(letters: list[str], data: st.DataObject) -> None:
    labels = [LETTERS[letter] for letter in letters]
    starts = sorted(data.draw(st.lists(st.integers(0, len(letters) - 1), min_size=1, max_size=12)))
    edges = [next((other for other in starts if other > start), len(letters)) for start in starts]
    covered = [labels[start:edge] for start, edge in zip(starts, edges, strict=True)]
    expected = [next((label for label in part if label is not Label.GLUE), Label.GLUE) for part in covered]
    runs = CharRuns.of(np.array(labels, np.int8)).tokens(np.array(starts, np.int32), len(letters))
    assert labels_of(runs) == expected
    check_runs(runs, len(starts))


def test_runs_of_long_arrays() -> None:
    labels = np.repeat(np.array([0, 3, 0, 5], np.int8), 20_000)
    runs = CharRuns.of(labels)
    assert runs.starts.tolist() == [0, 20_000, 40_000, 60_000] and runs.labels.tolist() == [0, 3, 0, 5]
    assert len(CharRuns.of(labels[:0]).starts) == 0
