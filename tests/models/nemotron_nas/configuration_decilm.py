"""Configuration of a Nemotron-NAS (DeciLM) model: a Llama whose layers each have their own attention and FFN."""

from typing import Any

from transformers import LlamaConfig


class Block(dict[str, Any]):
    """A dictionary of the JSON file, read by attribute as SGLang does."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return Block(self[name]) if isinstance(self[name], dict) else self[name]


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"
    block_configs: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.block_configs = [Block(block) for block in self.block_configs or []]
        super().__post_init__(**kwargs)
