"""Tiny byte-level tokenizers that are made in a moment."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "<think>\nThe user wants the weather.\n</think>\n\nHello there, the weather is fine.",
    "<tool_response>\nsunny\n</tool_response> <TOOLCALL>[]</TOOLCALL>",
]


def tiny_tokenizer(control: tuple[str, ...] = CHATML, merges: int = 64, plain: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level BPE: the 256 bytes, `merges` learned merges, special `control` and ordinary `plain` added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer
