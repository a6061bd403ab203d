"""gpt-oss (harmony): a turn is a sequence of messages on channels; the recipient makes a message a call."""

from __future__ import annotations

from .family import Family

GPT_OSS = Family(
    name="gpt-oss",
    title="gpt-oss",
    turn_end=("<|return|>", "<|call|>", "<|end|>"),
    turn_start=("<|start|>",),
    channels=True,
    needs=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    drift="B",
    unserved="attention sinks and interleaved sliding windows",
)
FAMILIES = (GPT_OSS,)
