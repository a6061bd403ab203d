"""An independent replay of compressed sessions on a Hugging Face model, in plain fp32 torch.

Nothing here imports the engine or the kernels: the formulas are written a second time, so that an error has to be
made twice to go unseen. What the engine and this replay must agree on is this definition.

**State of a session.** `length` = number of tokens whose K/V have been computed (positions `0 .. length-1`). The
last token that a turn sampled has not been fed back, hence has no K/V; the next turn computes it first. Per layer
with attention and per KV head: the kept entries (their positions, keys after RoPE, values), all heads the same
number, in order of position; `start = length - (number kept)`. Every token runs at its true position.

**Query rings.** Per attention layer and phase (others, think, act, tool), the 8 newest queries after RoPE, of every
token that was computed in this session, prompt and generated alike. A token's phase comes from its label (say,
input and glue count as others). Tokens that came out of the shared prefix tree were not computed here and leave no
query; the last 32 tokens of a first prompt are always computed.

**When.** After a prefill chunk if more than `budget` entries are held. During decode, after a token has been
computed, if `budget + 128` or more are held. At the end of the turn if more than `budget` are held.

**How many.** `new start = floor((length - budget) / page) * page`; nothing happens when that is not beyond `start`.
The entries kept are `length - new start`, so with pages up to `page - 1` more than the budget.

**Which.** With the n held entries of one layer and KV head as candidates, in order of position:
`score_i = mean over all valid queries u of softmax_i( max over the query heads of the group of q_u . k_i / sqrt(d) )`,
the softmax over all n candidates without a causal mask; then a max-pool of width 7 (stride 1, padded 3) along the
candidates. Candidates at positions below 32 and the last 32 candidates are always kept; the rest is filled with the
highest scores, the lowest position first among equals.
"""

from . import dense, recorded
from .model import load_model
from .policy import PHASES, Rings, agentkv_scores, keep_set, tie_gap
from .replay import Compaction, Replay, Settings, Turn, prefill_chunks

__all__ = [
    "PHASES",
    "Compaction",
    "Replay",
    "Rings",
    "Settings",
    "Turn",
    "agentkv_scores",
    "dense",
    "keep_set",
    "load_model",
    "prefill_chunks",
    "recorded",
    "tie_gap",
]
