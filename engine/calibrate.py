"""`agentkv calibrate`: statistics of a model's queries before RoPE, which the `triattention` policy scores with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentkv_serve.engine.policies.rope import Rope
from agentkv_serve.engine.policies.statistics import Statistics

app = typer.Typer(add_completion=False, rich_markup_mode=None)

CHUNK = 1024
_NAME = "agentkv_calibrate"


class Tally:
    """Sums over the queries of a run, layer by layer in the order of the model's attention layers."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._sums: dict[int, Tensor] = {}  # complex [Hq, F]
        self._sizes: dict[int, Tensor] = {}  # [Hq, F]
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self.count = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The model's attention step on new tokens; adds their queries to the sums.

        query [Hq, T, D], key and value [Hkv, T, D], all after RoPE -> [T, Hq, D].
        """
        if layer in self._keys:
            key, value = (torch.cat(pair, 1) for pair in zip(self._keys[layer], (key, value), strict=True))
        self._keys[layer] = (key, value)
        new, size = query.shape[1], key.shape[1]
        positions = torch.arange(size - new, size, device=query.device)
        pairs = self._rope.frequencies.numel()
        plain = self._rope.unrotate(query, positions)
        turning = torch.complex(plain[..., :pairs], plain[..., pairs : 2 * pairs])
        self._sums[layer] = self._sums.get(layer, 0) + turning.sum(1)
        self._sizes[layer] = self._sizes.get(layer, 0) + turning.abs().sum(1)
        self.count = size
        mask = torch.ones(new, size, dtype=torch.bool, device=query.device).tril(size - new)
        out = scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def statistics(self) -> Statistics:
        """Means over all tokens so far."""
        layers = sorted(self._sums)
        mean = torch.stack([self._sums[layer] for layer in layers]) / self.count
        magnitude = torch.stack([self._sizes[layer] for layer in layers]) / self.count
        return Statistics(mean.cpu(), magnitude.cpu())


def collect(model: Any, ids: list[int], rope: Rope) -> Statistics:
    """Runs a Hugging Face causal model over tokens, `CHUNK` at a time, and gives the statistics of its queries.

    The model must have been loaded with `attn_implementation=attention_name()`. Queries are taken as attention sees
    them and turned back, so whatever the model does to a query before RoPE (norms, biases) counts.
    """
    tally = Tally(rope.to(model.device))
    with torch.no_grad():
        for first in range(0, len(ids), CHUNK):
            part = ids[first : first + CHUNK]
            model(
                input_ids=torch.tensor([part], device=model.device),
                position_ids=torch.arange(first, first + len(part), device=model.device)[None],
                use_cache=False,
                logits_to_keep=1,
                memory=tally,
            )
    return tally.statistics()


def attention_name() -> str:
    """Registers the attention step that hands everything to a `Tally`, under the name that is returned."""
    from transformers import AttentionInterface

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, memory: Tally, **_: Any
    ) -> tuple[Tensor, None]:
        return memory.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None

    AttentionInterface.register(_NAME, attention)
    return _NAME


@app.command()
def calibrate(
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the model.")],
    input: Annotated[Path, typer.Option(help="Plain text to run the model on; its domain matters little.")],
    output: Annotated[Path, typer.Option(help="File to write.")],
    max_length: Annotated[int, typer.Option(help="Use at most this many tokens of the text.")] = 32768,
    device: Annotated[str, typer.Option(help="cpu, cuda, …; default: a GPU if there is one.")] = "",
) -> None:
    """Write a model's query statistics in TriAttention's file format, for `--agentkv-statistics`."""
    import transformers

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer(input.read_text(), add_special_tokens=False)["input_ids"][:max_length]
    if len(ids) < CHUNK:
        raise typer.BadParameter(f"{input} has {len(ids)} tokens; statistics need at least {CHUNK}")
    network = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16 if device != "cpu" else torch.float32, attn_implementation=attention_name()
    )
    network = network.eval().to(device)
    rope = Rope.from_config(network.config)
    statistics = collect(network, ids, rope)
    head_dim = getattr(network.config, "head_dim", None)
    statistics.save(
        output,
        {
            "num_traces": 1,
            "tokens": len(ids),
            "head_dim": head_dim or network.config.hidden_size // network.config.num_attention_heads,
            "dtype": str(network.dtype).removeprefix("torch."),
            "rope_style": "interleaved" if rope.interleaved else "half",
            "rope_type": (getattr(network.config, "rope_parameters", None) or {}).get("rope_type", "default"),
            "use_chat_template": False,
        },
    )
    typer.echo(f"{output}: {statistics.mean.shape[0]} layers x {statistics.mean.shape[1]} heads, {len(ids)} tokens")


if __name__ == "__main__":
    app()
