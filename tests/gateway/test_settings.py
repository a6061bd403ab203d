"""Settings: which source wins, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from agentkv_serve.gateway.cli import app
from agentkv_serve.gateway.settings import Settings, load_settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "gateway.yaml"
    file.write_text("model_path: /from/file\nport: 1111\nbudget:\n  auto: 1000\n  cap: 2000\n")
    return file


def test_flags_win_over_environment_over_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_GATEWAY_PORT", "2222")
    monkeypatch.setenv("AGENTKV_GATEWAY_BUDGET__CAP", "3000")
    settings = load_settings(config, {"port": 3333})
    assert settings.port == 3333
    assert settings.budget.cap == 3000 and settings.budget.auto == 1000
    assert settings.model_path == Path("/from/file")
    assert load_settings(config).port == 2222


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("bugdet: {}\n", "bugdet"),
        ("budget:\n  capp: 1\n", "capp"),
        ("sessions:\n  idle_ttl: -1\n", "idle_ttl"),
        ("workers:\n- url: ftp://x\n", "url"),
        ("workers:\n- url: http://u:p@x\n", "url"),
        ("budget:\n  default: 96\n", "default"),
        ("api_keys:\n- sha256: plain-text-key\n  tenant: a\n", "sha256"),
        ("host: 0.0.0.0\n", "host 0.0.0.0"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("model_path: /m\n" + text)
    with pytest.raises(ValidationError, match=place):
        load_settings(file)


def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_GATEWAY_BUDGETT__CAP", "3000")
    with pytest.raises(ValueError, match="AGENTKV_GATEWAY_BUDGETT__CAP"):
        load_settings(None, {"model_path": "/m"})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        load_settings(Path("/nowhere.yaml"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example"])
def test_an_open_address_needs_keys(host: str) -> None:
    with pytest.raises(ValidationError, match="api_keys"):
        Settings(model_path=Path("/m"), host=host)
    assert Settings(model_path=Path("/m"), host=host, api_key="k").host == host  # type: ignore[arg-type]


def test_secrets_are_not_shown() -> None:
    settings = Settings(model_path=Path("/m"), api_key="k-secret", worker_key="w-secret", secret="long-enough-secret")  # type: ignore[arg-type]
    assert "-secret" not in repr(settings) + settings.model_dump_json()


def test_check_config_prints_what_would_be_used() -> None:
    done = CliRunner().invoke(
        app, ["--model-path", "/m", "--budget", "512", "--set", "sessions.idle_ttl=60", "--check-config"]
    )
    assert done.exit_code == 0
    assert '"default": 512' in done.output and '"idle_ttl": 60.0' in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check-config"], "model_path"),
        (["--model-path", "/m", "--set", "nothing.such=1", "--check-config"], "nothing"),
        (["--model-path", "/m", "--worker", "nope", "--check-config"], "workers.0.url"),
        (["--model-path", "/m", "--set", "no-equals", "--check-config"], "dotted.name=value"),
    ],
)
def test_wrong_flags_stop_the_command(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.output


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, each in model.model_fields.items():
        kind = each.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_setting_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    table = text[text.index("| setting | default |") :]
    assert [name for name in leaves(Settings) if f"`{name}`" not in table] == []
