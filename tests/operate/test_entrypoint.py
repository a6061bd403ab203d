"""The containers' entry point, health check and drain, as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.gateway.serving import Serving
from tests.operate.compose import DOCKER

SMI = "GPU-aaaa, {driver}, NVIDIA H200, 143771 MiB\nGPU-bbbb, {driver}, NVIDIA H200, 143771 MiB\n"


class Container:
    """What the entry point finds around it: a folder of programs, secrets, models, GPU locks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (self.model / name).write_text("{}")
        (folder / "secrets").mkdir()
        (folder / "bin").mkdir()
        # Shows what the entry point has become.
        self.program("agentkv", 'echo "$@"; env | grep -E "AGENTKV|CUDA" | sort; sleep "${LIVE:-0}"')

    def program(self, name: str, body: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def gpus(self, driver: str = "580.95.05") -> None:
        self.program("nvidia-smi", f"printf '{SMI.format(driver=driver)}'")

    def secret(self, name: str, text: str) -> None:
        (self.folder / "secrets" / name).write_text(text + "\n")

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, DOCKER / "entrypoint.py", *words],
            env={
                "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
                "AGENTKV_SECRETS": str(self.folder / "secrets"),
                "AGENTKV_MODEL": str(self.model),
                "AGENTKV_GPU_LOCKS": str(self.folder / "gpus"),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_a_gateway_says_what_it_serves_and_reads_its_secrets(container: Container) -> None:
    container.secret("api_key", "client-key")
    container.secret("store_url", "redis://:pw@valkey:6379/0")
    code, out, err = container.run("gateway", "--log-level", "debug", AGENTKV_BUDGET="4096")
    assert code == 0 and out.startswith("gateway --log-level debug\n")
    assert "AGENTKV_GATEWAY_API_KEY=client-key\n" in out
    assert "AGENTKV_GATEWAY_STORE__URL=redis://:pw@valkey:6379/0\n" in out
    assert "AGENTKV_GATEWAY_BUDGET__DEFAULT=4096\n" in out and f"MODEL_PATH={container.model}\n" in out
    assert str(container.model) in err and "4096" in err and "client-key" not in err and "pw@" not in err


def test_a_gateway_waits_for_its_model_and_says_what_is_missing(container: Container) -> None:
    (container.model / "tokenizer.json").rename(container.model / "away")
    code, out, err = container.run("gateway", AGENTKV_MODEL_WAIT="0")
    assert code == 78 and out == "" and "mount the model folder" in err
    process = container.start("gateway", AGENTKV_MODEL_WAIT="60")
    time.sleep(0.3)
    assert process.poll() is None
    (container.model / "away").rename(container.model / "tokenizer.json")
    out, err = process.communicate(timeout=30)
    assert out.startswith("gateway") and "waiting for" in err


def test_an_engine_on_a_cpu_registers_with_key_and_token(container: Container) -> None:
    container.secret("worker_key", "the-workers-key")
    container.secret("join_token", "the-join-token")
    code, out, err = container.run(
        "engine",
        "--page-size",
        "16",
        AGENTKV_REGISTER="http://gateway:8000 http://other:8000",
        AGENTKV_ENGINE_FLAGS="--log-level 'warning'",
    )
    words = out.splitlines()[0].split()
    assert code == 0 and words[:3] == ["engine", "--model-path", str(container.model)]
    assert words[words.index("--api-key") + 1] == "the-workers-key"
    assert [words[i + 1] for i, w in enumerate(words) if w == "--agentkv-register"] == [
        "http://gateway:8000",
        "http://other:8000",
    ]
    assert words[-4:] == ["--log-level", "warning", "--page-size", "16"]
    assert "AGENTKV_JOIN_TOKEN=the-join-token\n" in out
    assert "CPU" in err and str(container.model) in err and "the-workers-key" not in err


def test_an_engine_without_a_model_makes_the_default_one_or_says_what_to_mount(container: Container) -> None:
    cache = container.folder / "cache"
    made = cache / "models" / "SmolLM2-135M-Instruct"
    body = f'if [ "$1" = model ]; then mkdir -p {made}; echo "{{}}" > {made}/config.json; else echo "$@"; fi'
    container.program("agentkv", body)
    code, out, err = container.run("engine", AGENTKV_MODEL="default", AGENTKV_CACHE=str(cache))
    assert code == 0 and f"--model-path {made}" in out and "making the default model" in err
    code, _, err = container.run("engine", AGENTKV_MODEL="/models/none")
    assert code == 78 and "/models/none has no config.json" in err
    container.program("agentkv", "exit 3")
    code, _, err = container.run("engine", AGENTKV_MODEL="", AGENTKV_CACHE=str(container.folder / "other"))
    assert code == 78 and "could not be made" in err


def test_an_engine_on_a_gpu_says_device_driver_model_and_budget(container: Container) -> None:
    container.gpus()
    code, out, err = container.run("engine", AGENTKV_DEVICE="gpu", AGENTKV_DRIVER_NEED="580", AGENTKV_BUDGET="4096")
    assert code == 0 and "CUDA_VISIBLE_DEVICES=GPU-aaaa\n" in out and "--tp-size" not in out
    for word in ("NVIDIA H200", "143771 MiB", "580.95.05", "580", str(container.model), "4096"):
        assert word in err


@pytest.mark.parametrize(
    "driver, environment, said",
    [
        ("570.10", {"AGENTKV_DRIVER_NEED": "580"}, "driver is 570.10; this image needs 580"),
        ("580.1", {"AGENTKV_GPUS_EACH": "3"}, "3 GPUs are needed and 2 of 2 are free"),
        (None, {}, "container toolkit"),
        ("", {}, "nvidia-smi finds no GPU"),
    ],
)
def test_an_engine_never_falls_back_to_the_cpu(
    container: Container, driver: str | None, environment: dict[str, str], said: str
) -> None:
    if driver:
        container.gpus(driver)
    elif driver is not None:
        container.program("nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    code, out, err = container.run("engine", AGENTKV_DEVICE="gpu", **environment)
    assert code == 78 and out == "" and said in err


def test_engines_of_one_host_never_share_a_gpu(container: Container) -> None:
    container.gpus()
    running = [container.start("engine", AGENTKV_DEVICE="gpu", LIVE="30") for _ in range(2)]
    heads = []
    for process in running:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("CUDA_VISIBLE_DEVICES"):
                heads.append(line.strip().partition("=")[2])
                break
    assert sorted(heads) == ["GPU-aaaa", "GPU-bbbb"]
    code, _, err = container.run("engine", AGENTKV_DEVICE="gpu")
    assert code == 78 and "0 of 2 are free" in err

    def end(process: subprocess.Popen[str]) -> None:
        os.killpg(process.pid, signal.SIGTERM)  # the shell's `sleep` has inherited the lock too
        process.communicate(timeout=10)

    end(running[heads.index("GPU-aaaa")])
    code, out, _ = container.run("engine", AGENTKV_DEVICE="gpu")
    assert code == 0 and "CUDA_VISIBLE_DEVICES=GPU-aaaa" in out
    end(running[heads.index("GPU-bbbb")])


def test_tensor_parallel_engines_take_as_many_gpus_as_they_need(container: Container) -> None:
    container.gpus()
    code, out, _ = container.run("engine", AGENTKV_DEVICE="gpu", AGENTKV_GPUS_EACH="2")
    assert code == 0 and "CUDA_VISIBLE_DEVICES=GPU-aaaa,GPU-bbbb\n" in out and "--tp-size 2" in out


def test_another_command_runs_as_it_is(container: Container) -> None:
    code, out, _ = container.run("echo", "hello")
    assert (code, out) == (0, "hello\n")


def test_secrets_that_cannot_be_read_are_named(container: Container) -> None:
    container.secret("api_key", "k")
    (container.folder / "secrets" / "api_key").chmod(0)
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, DOCKER / "entrypoint.py", "gateway"]
        for part in (container.folder, *container.folder.parents):
            if os.stat(part).st_uid == 0 and str(part) != "/":
                part.chmod(part.stat().st_mode | 0o755)
    else:
        command = [sys.executable, DOCKER / "entrypoint.py", "gateway"]
    environment = {"PATH": "/usr/bin:/bin", "AGENTKV_SECRETS": str(container.folder / "secrets")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 78 and "cannot be read by user" in done.stderr


@pytest.mark.parametrize("status, code, said", [(200, 0, "200"), (503, 1, "may still be loading")])
def test_the_health_check_tells_loading_from_ready(status: int, code: int, said: str) -> None:
    async def health(request: Request) -> Response:
        return Response(status_code=status)

    with Serving(Starlette(routes=[Route("/health", health)])) as server:
        command = [sys.executable, DOCKER / "health.py", f"{server.url}/health"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code and said in done.stdout


def test_the_health_check_says_when_nothing_answers() -> None:
    command = [sys.executable, DOCKER / "health.py", "http://127.0.0.1:9/health"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no answer" in done.stdout


def drain(tmp_path: Path, url: str, limit: str = "20") -> subprocess.Popen[str]:
    command = [sys.executable, str(DOCKER / "drain.py"), "--metrics", url, "--pid-file", str(tmp_path / "pid")]
    return subprocess.Popen([*command, "--limit", limit], stderr=subprocess.PIPE, text=True)


def test_draining_takes_leave_and_waits_for_running_turns(tmp_path: Path) -> None:
    running = 2.0

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(f'sglang:num_running_reqs{{x="1"}} {running}\nsglang:num_queue_reqs 0.0\n')

    announcer = subprocess.Popen(["sleep", "60"])
    (tmp_path / "pid").write_text(str(announcer.pid))
    with Serving(Starlette(routes=[Route("/metrics", metrics)])) as server:
        process = drain(tmp_path, f"{server.url}/metrics")
        assert announcer.wait(10) == -signal.SIGTERM
        time.sleep(1.5)
        assert process.poll() is None, "turns still run"
        running = 0.0
        process.communicate(timeout=20)
        assert process.returncode == 0
        running = 1.0
        process = drain(tmp_path, f"{server.url}/metrics", "1.5")
        _, said = process.communicate(timeout=20)
        assert process.returncode == 1 and "turns still run" in said


def test_draining_an_engine_that_is_gone_ends_at_once(tmp_path: Path) -> None:
    process = drain(tmp_path, "http://127.0.0.1:9/metrics")
    process.communicate(timeout=20)
    assert process.returncode == 0
