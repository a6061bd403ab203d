"""Starts a container: says what it runs on, reads secrets from files, becomes `agentkv gateway` or `agentkv engine`.

Standard library only. Variables:
  AGENTKV_SECRETS      folder of the secret files (default /run/secrets)
  AGENTKV_MODEL        model folder; empty or `default`: an engine makes the small default model under AGENTKV_CACHE
  AGENTKV_BUDGET       KV tokens per layer and KV head, full or auto
  AGENTKV_DEVICE       cpu or gpu (engines)
  AGENTKV_GPUS_EACH    GPUs per engine, for tensor parallelism (default 1)
  AGENTKV_GPU_LOCKS    folder shared by the engines of a host, where each claims its GPUs (default /gpus)
  AGENTKV_REGISTER     gateway URLs to register at, separated by blanks
  AGENTKV_ENGINE_FLAGS further flags of the engine
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

DEFAULT_MODEL = "models/SmolLM2-135M-Instruct"
GATEWAY_SECRETS = {
    "api_key": "API_KEY",
    "admin_key": "ADMIN_KEY",
    "worker_key": "WORKER_KEY",
    "secret": "SECRET",
    "join_token": "JOIN_TOKEN",
    "store_url": "STORE__URL",
    "ledger_key": "STORE__LEDGER_KEY",
}
TOOLKIT = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"


class CannotStart(Exception):
    """The container cannot do its work; the message says what to do."""


def say(text: str) -> None:
    """One line at the top of the container's log."""
    print(f"agentkv: {text}", file=sys.stderr, flush=True)


def secret(name: str) -> str | None:
    """The text of a secret file; None when it is not mounted."""
    file = Path(os.environ.get("AGENTKV_SECRETS", "/run/secrets")) / name
    if not file.is_file():
        return None
    try:
        return file.read_text().strip()
    except PermissionError:
        raise CannotStart(f"{file} cannot be read by user {os.getuid()}: make it readable (chmod 644)") from None


def model_folder() -> Path:
    """The model's folder, as it is or will be."""
    given = os.environ.get("AGENTKV_MODEL", "")
    if given and given != "default":
        return Path(given)
    return Path(os.environ.get("AGENTKV_CACHE", "/models")) / DEFAULT_MODEL


def gateway(arguments: list[str]) -> list[str]:
    """The gateway's command. Waits for the model folder: an engine of the same start may be making it."""
    folder = model_folder()
    for name, variable in GATEWAY_SECRETS.items():
        value = secret(name)
        if value:
            os.environ[f"AGENTKV_GATEWAY_{variable}"] = value
    os.environ["AGENTKV_GATEWAY_MODEL_PATH"] = str(folder)
    os.environ.setdefault("AGENTKV_GATEWAY_BUDGET__DEFAULT", os.environ.get("AGENTKV_BUDGET") or "4096")
    say(f"gateway: model {folder}, default budget {os.environ['AGENTKV_GATEWAY_BUDGET__DEFAULT']}")
    limit = float(os.environ.get("AGENTKV_MODEL_WAIT", "900"))
    waited = 0.0
    while not (folder / "tokenizer.json").is_file():
        if waited >= limit:
            raise CannotStart(f"{folder} has no tokenizer.json after {limit:.0f} s: mount the model folder there")
        if waited % 30 == 0:
            say(f"waiting for {folder}")
        time.sleep(1)
        waited += 1
    return ["agentkv", "gateway", *arguments]


def engine(arguments: list[str]) -> list[str]:
    """The engine's command."""
    device = os.environ.get("AGENTKV_DEVICE", "cpu")
    if device not in ("cpu", "gpu"):
        raise CannotStart(f"AGENTKV_DEVICE is {device!r}: give cpu or gpu")
    say(f"engine on {describe_gpus() if device == 'gpu' else 'CPU, as asked for'}")
    folder = model_folder()
    if not (folder / "config.json").is_file():
        if os.environ.get("AGENTKV_MODEL", "default") not in ("", "default"):
            raise CannotStart(f"{folder} has no config.json: mount the folder of the model there")
        say("making the default model")
        if subprocess.run(["agentkv", "model"], check=False).returncode:
            raise CannotStart("the default model could not be made; the lines above say why")
    say(f"model {folder}, default budget {os.environ.get('AGENTKV_BUDGET') or '4096'}")
    # Whatever flags come later: drain.py and Prometheus read the metrics.
    command = ["agentkv", "engine", "--model-path", str(folder), "--host", "0.0.0.0", "--enable-metrics"]
    key = secret("worker_key")
    if key:
        command += ["--api-key", key]
    if secret("join_token"):
        os.environ["AGENTKV_JOIN_TOKEN"] = secret("join_token") or ""
    for url in os.environ.get("AGENTKV_REGISTER", "").split():
        command += ["--agentkv-register", url]
    each = int(os.environ.get("AGENTKV_GPUS_EACH") or "1")
    if device == "gpu" and each > 1:
        command += ["--tp-size", str(each)]
    return [*command, *shlex.split(os.environ.get("AGENTKV_ENGINE_FLAGS", "")), *arguments]


def describe_gpus() -> str:
    """Claims this engine's GPUs and tells which they are. Never falls back to the CPU."""
    if shutil.which("nvidia-smi") is None:
        raise CannotStart(
            f"no GPU is visible in this container. Install the NVIDIA container toolkit ({TOOLKIT}) and give the "
            "container a GPU, or choose the profile cpu"
        )
    query = ["nvidia-smi", "--query-gpu=uuid,driver_version,name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not rows:
        raise CannotStart(f"nvidia-smi finds no GPU: {(done.stderr or done.stdout).strip()[:300]}")
    driver, need = rows[0][1], os.environ.get("AGENTKV_DRIVER_NEED", "0")
    if int(driver.split(".")[0]) < int(need):
        raise CannotStart(f"the GPU's driver is {driver}; this image needs {need} or newer: update it on the host")
    each = int(os.environ.get("AGENTKV_GPUS_EACH") or "1")
    mine = claim([row[0] for row in rows], each)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    names = ", ".join(f"{name} ({memory})" for uuid, _, name, memory in rows if uuid in mine)
    return f"GPU {names}, driver {driver} (needs {need} or newer)"


def claim(gpus: list[str], count: int) -> list[str]:
    """Takes `count` of the host's GPUs that no other engine has. The locks are held by the process that this one
    becomes, and end with it: several engines on one host never share a GPU."""
    folder = Path(os.environ.get("AGENTKV_GPU_LOCKS", "/gpus"))
    folder.mkdir(parents=True, exist_ok=True)
    mine: list[str] = []
    for gpu in gpus:
        if len(mine) == count:
            break
        handle = os.open(folder / gpu, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            continue
        os.set_inheritable(handle, True)
        mine.append(gpu)
    if len(mine) < count:
        raise CannotStart(
            f"{count} GPUs are needed and {len(mine)} of {len(gpus)} are free: scale to fewer engines, or lower "
            "AGENTKV_GPUS_EACH"
        )
    return mine


def main() -> None:
    """Becomes the command of the role in the first argument; any other command runs as it is."""
    role, *arguments = sys.argv[1:] or ["engine"]
    try:
        command = {"gateway": gateway, "engine": engine}[role](arguments) if role in ("gateway", "engine") else None
    except CannotStart as error:
        say(f"cannot start: {error}")
        sys.exit(78)
    words = command or [role, *arguments]
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
