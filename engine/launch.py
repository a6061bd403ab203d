"""`agentkv engine`: SGLang's own server with the flags that the AgentKV cache needs, on a GPU or on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentkv_serve import attention_shape, joining
from agentkv_serve.engine import keys, selfcheck
from agentkv_serve.engine.config import ENVIRONMENT, EngineConfig
from agentkv_serve.engine.flags import REFUSALS, REQUIRED
from agentkv_serve.engine.served import PolicyError, served_policies
from agentkv_serve.parsers import parser_flags

app = typer.Typer(add_completion=False, rich_markup_mode=None)

CPU_FLAGS: dict[str, str | None] = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--max-running-requests": "32",
    # Of a CPU's memory SGLang would take most for the KV pool.
    "--max-total-tokens": "65536",
    # SGLang's own guess takes from the machine's memory what a GPU would need for activations: with unlimited prefill
    # chunks nothing is left of 24 GiB.
    "--mem-fraction-static": "0.8",
    "--sleep-on-idle": None,
}
GPU_FLAGS: dict[str, str | None] = {"--attention-backend": "triton", "--disable-prefill-cuda-graph": None}


def server_command(
    extra: list[str],
    model_path: Path,
    port: int,
    host: str,
    *,
    cpu: bool,
    overlap: bool | None = None,
    metrics: bool = True,
) -> list[str]:
    """The command line of SGLang's server: with the flags that the cache and the device need, and the parsers of the
    model's family. A flag of ours that the user gives too keeps the user's value.

    Args:
        overlap: whether the scheduler works while a forward runs; None = on a GPU.
        metrics: whether the server answers at /metrics, where the sessions' numbers stand among SGLang's own.

    Raises:
        typer.BadParameter: no such model folder, a model whose attention cannot be compressed, or a flag that cannot
            work with the AgentKV cache, by name.
    """
    if not model_path.is_dir():
        raise typer.BadParameter(
            f"--model-path {model_path}: there is no folder of that name; give a Hugging Face folder"
        )
    config = model_path / "config.json"
    if config.is_file() and (reason := attention_shape.refusal(json.loads(config.read_text()))):
        raise typer.BadParameter(f"--model-path {model_path} {reason}; SGLang without the AgentKV cache may serve it")
    given = {argument.split("=", 1)[0] for argument in extra if argument.startswith("--")}
    for refusal in REFUSALS:
        if refusal.refuses(extra):
            raise typer.BadParameter(f"{refusal.flag} cannot be used with the AgentKV cache: {refusal.reason}")
    # -P: a `kernels` folder in the working directory must not shadow the package that SGLang imports.
    command = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", str(model_path)]
    command += ["--host", host, "--port", str(port)]
    # On a CPU forwards are synchronous: overlap scheduling would only run each turn's last token for nothing.
    serial: dict[str, str | None] = (
        {} if (not cpu if overlap is None else overlap) else {"--disable-overlap-schedule": None}
    )
    shown: dict[str, str | None] = {"--enable-metrics": None} if metrics else {}
    device = {**CPU_FLAGS, **cpu_dtype(model_path)} if cpu else GPU_FLAGS
    named = {"--served-model-name": model_path.name, **parser_flags(model_path)}
    for flag, value in {**REQUIRED, **serial, **shown, **device, **named}.items():
        if flag not in given:
            command += [flag] if value is None else [flag, value]
    return command + extra


def cpu_environment(extra: list[str], cores: int) -> dict[str, str]:
    """What a server on a CPU wants in its environment: threads of a rank, and the core of each tensor-parallel rank.

    One core stays with the gateway and SGLang's other processes: a thread that has to share its core holds all others
    up at every barrier, and decoding slows down tenfold. SGLang itself takes no more ranks than there are NUMA nodes
    unless it is told which cores they have.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", dest="ranks")
    given = parser.parse_known_args(extra)[0].ranks or "1"
    ranks = int(given) if given.isdecimal() else 1  # SGLang says what is wrong with it
    environment = {"OMP_NUM_THREADS": str(max(1, (cores - 1) // max(1, ranks)))}
    if ranks > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(ranks))
    return environment


def cpu_dtype(model_path: Path) -> dict[str, str]:
    """`--dtype float32` on an x86 CPU without AVX-512, where torch multiplies bfloat16 matrices six times slower.

    Not for weights that would then fill more than a quarter of the memory: those stay in the model's own type.
    """
    import torch

    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return {}
    weights = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"--dtype": "float32"} if 2 * weights <= memory / 4 else {}


def has_gpu() -> bool:
    """Whether torch sees an accelerator."""
    import torch

    return bool(torch.cuda.is_available())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def engine(
    context: typer.Context,
    model_path: Annotated[Path, typer.Option(help="Hugging Face folder of the model.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen on; engines belong on loopback or a private net.")] = (
        "127.0.0.1"
    ),
    agentkv_compress_every: Annotated[int, typer.Option(help="Decode tokens over the budget per compression.")] = 128,
    agentkv_max_sessions: Annotated[
        int, typer.Option(help="Live compressed sessions; 0 = as many as fit in the ring share.")
    ] = 0,
    agentkv_ring_share: Annotated[
        float, typer.Option(help="Query rings' share of the KV pool's bytes; 0 = 0.02 on a GPU, 0.2 on a CPU.")
    ] = 0.0,
    agentkv_say_phase: Annotated[str, typer.Option(help="Phase of visible text: others, act or think.")] = "others",
    agentkv_policy: Annotated[str, typer.Option(help="Policy of turns that name none.")] = "agentkv",
    agentkv_policies: Annotated[
        str,
        typer.Option(
            help="Policies served beside it, comma-separated; the query rings are sized for the largest. "
            "[default: those that need no larger ones]"
        ),
    ] = "",
    agentkv_statistics: Annotated[
        Path | None, typer.Option(help="The model's query statistics (agentkv calibrate), for triattention.")
    ] = None,
    agentkv_auto_price: Annotated[
        float, typer.Option(help="Budget auto: share of sharp misses that 1,000 further entries have to save.", min=0.0)
    ] = 0.0024,
    agentkv_auto_epsilon: Annotated[
        float | None,
        typer.Option(help="Budget auto, in place of a price: largest share of sharp misses.", min=0.0, max=1.0),
    ] = None,
    agentkv_auto_floor: Annotated[int, typer.Option(help="Budget auto: the smallest budget.", min=1)] = 512,
    agentkv_allow_forced: Annotated[
        bool, typer.Option(help="Evaluation only: turns may say which tokens they yield.")
    ] = False,
    agentkv_kernels: Annotated[str, typer.Option(help="triton, torch, or auto (by device).")] = "auto",
    agentkv_overlap: Annotated[
        bool | None,
        typer.Option(help="Overlap scheduling: the scheduler works while a forward runs. [default: on a GPU]"),
    ] = None,
    agentkv_metrics: Annotated[
        bool, typer.Option(help="Metrics of sessions and of SGLang at /metrics, which asks for no key.")
    ] = True,
    agentkv_idle_seconds: Annotated[float, typer.Option(help="Release a session's state after this time.")] = 3600.0,
    agentkv_register: Annotated[
        list[str] | None, typer.Option(help="URL of a gateway to register at; repeat for several.")
    ] = None,
    agentkv_url: Annotated[
        str | None, typer.Option(help="Where gateways reach this worker. [default: http://HOSTNAME:PORT]")
    ] = None,
) -> None:
    """Start one SGLang worker with the AgentKV cache. All further flags are SGLang's own.

    AGENTKV_ENGINE_API_KEY is the key that clients must send; `--api-key` would show it to everybody on the machine.
    """
    selfcheck.require_version()
    if agentkv_say_phase not in ("others", "act", "think"):
        raise typer.BadParameter("--agentkv-say-phase must be others, act or think")
    if agentkv_kernels not in ("auto", "torch", "triton"):
        raise typer.BadParameter("--agentkv-kernels must be auto, torch or triton")
    cpu = not has_gpu()
    config = EngineConfig(
        compress_every=agentkv_compress_every,
        max_sessions=agentkv_max_sessions,
        ring_share=agentkv_ring_share or (0.2 if cpu else 0.02),
        say_phase=agentkv_say_phase,
        policy=agentkv_policy,
        policies=tuple(name.strip() for name in agentkv_policies.split(",") if name.strip()),
        auto_price=agentkv_auto_price,
        auto_epsilon=agentkv_auto_epsilon,
        auto_floor=agentkv_auto_floor,
        allow_forced=agentkv_allow_forced,
        statistics=str(agentkv_statistics.resolve()) if agentkv_statistics else "",
        kernels=agentkv_kernels,
        idle_seconds=agentkv_idle_seconds,
        dump_dir=os.environ.get("AGENTKV_DUMP", ""),
    )
    try:
        served_policies(config)
    except PolicyError as error:
        raise typer.BadParameter(str(error)) from None
    if cpu:
        for name, value in cpu_environment(context.args, os.cpu_count() or 1).items():
            os.environ.setdefault(name, value)
    try:
        flags = keys.to_environment(context.args)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    command = server_command(
        flags,
        model_path,
        port,
        host,
        cpu=cpu,
        overlap=agentkv_overlap,
        metrics=agentkv_metrics,
    )
    os.environ[ENVIRONMENT] = config.dump()
    typer.echo(f"AgentKV engine on {'CPU' if cpu else 'GPU'}: {' '.join(command[4:])}", err=True)
    if agentkv_register:
        announce(agentkv_register, agentkv_url or joining.default_url(port), port)
    os.execv(command[0], command)


def announce(gateways: list[str], url: str, port: int) -> None:
    """Starts the process that registers this worker. It ends with this process, which becomes the server.

    Raises:
        typer.BadParameter: there is no join token.
    """
    if not joining.read_token():
        raise typer.BadParameter(
            f"--agentkv-register needs the gateways' join token in {joining.TOKEN_VARIABLE}, or in the file that "
            f"{joining.TOKEN_VARIABLE}_FILE names"
        )
    command = [sys.executable, "-P", "-m", "agentkv_serve.joining", "--url", url, "--parent", str(os.getpid())]
    command += ["--health", f"http://127.0.0.1:{port}/health"]
    subprocess.Popen([*command, *(word for gateway in gateways for word in ("--gateway", gateway))])


if __name__ == "__main__":
    app()
