"""The tiny models are what they claim to be: loadable, deterministic, with markers as single ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import FAMILIES, MARKERS, SPECIAL, write_model

IDS = list(range(3, 150))


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    with torch.no_grad():
        positions = torch.arange(len(IDS))[None]
        return model(input_ids=torch.tensor([IDS]), position_ids=positions, use_cache=False, logits_to_keep=1).logits


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"nemotron-nas"}))
def test_same_seed_same_model(tmp_path: Path, name: str) -> None:
    first, again, other = (
        logits(write_model(tmp_path / folder, name, seed=seed)) for folder, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=0.1)


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_model(tmp_path, "llama-one-layer"))
    text = "<|im_start|>assistant\n<think>\nnaïve</think><tool_call>{}</tool_call><|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL + MARKERS] == list(range(256, 265))
    assert max(ids) < 265
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
