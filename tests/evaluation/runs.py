"""Short agent runs in the shapes of recorded ones, and tiny models to replay them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from agentkv_serve.evaluation.decoder import Decoder
from agentkv_serve.evaluation.trajectory import Recording, Trajectory, half_of, tokenise
from agentkv_serve.phase_tagger import ChatFormat
from agentkv_serve.phase_tagger.formats.files import Transcript

torch.set_num_threads(1)


def messages(turns: int = 3) -> list[dict[str, Any]]:
    """A user who asks, an agent that looks an order up by its number and answers."""
    found: list[dict[str, Any]] = [{"role": "system", "content": "You help with orders. Be brief and exact."}]
    for turn in range(turns):
        order = f"#W{7_340_112 + 911 * turn}"
        call = {"name": "get_order", "arguments": json.dumps({"order_id": order})}
        found += [
            {"role": "user", "content": f"What about my order {order}?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"c{turn}", "content": json.dumps({"order": order, "status": "shipped"})},
            {"role": "assistant", "content": f"Order {order} has been shipped."},
        ]
    return found


def model(folder: Path) -> tuple[Decoder, Any]:
    """Our decoder and Hugging Face's model of one folder, fp32."""
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Decoder(found), found


def trajectory(folder: Path, turns: int = 3, length: int | None = None) -> Trajectory:
    """The run of `messages` in a model's tokens."""
    transcript = Transcript("orders", messages(turns))
    recording = Recording("orders", "orders", 0, half_of("orders"), "orders", transcript)
    found = tokenise(ChatFormat.from_folder(folder), recording, length)
    assert found is not None
    return found


def logits(model: Any, ids: np.ndarray, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Hugging Face's logits [n, V] of a token sequence; `mask` [n, n] bool says which keys each query sees."""
    given = {} if mask is None else {"attention_mask": mask[None, None]}
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.from_numpy(ids)[None], use_cache=False, **given).logits[0]
    return found
