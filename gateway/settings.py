"""All settings of the gateway. Sources, weakest first: YAML file, environment, command-line flags."""

from __future__ import annotations

import base64
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

ENV_PREFIX = "AGENTKV_GATEWAY_"
MIN_BUDGET = 128

Seconds = Annotated[float, Field(gt=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerSettings(_Part):
    """One engine worker. `key` falls back to `worker_key`; `id` to a name made from the address."""

    url: str
    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    key: SecretStr | None = None

    @field_validator("url")
    @classmethod
    def _plain_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError("a worker URL is http(s)://host:port without user, query or fragment")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError("a worker URL has no path: the gateway calls fixed engine paths only")
        return url.rstrip("/")


class KeySettings(_Part):
    """One API key, stored as the hex SHA-256 of its text, and the tenant that it belongs to."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")


class BudgetSettings(_Part):
    """KV budgets in tokens per layer and KV head. `auto` is the most that budget auto may be; `cap` None: the model's
    context length."""

    default: Annotated[int, Field(ge=MIN_BUDGET)] | Literal["full", "auto"] = 4096
    auto: int = Field(default=4096, ge=MIN_BUDGET)
    cap: int | None = Field(default=None, ge=MIN_BUDGET)


class TenantSettings(_Part):
    """Limits of one tenant; None takes the general value."""

    budget_cap: int | None = Field(default=None, ge=MIN_BUDGET)
    max_sessions: int | None = Field(default=None, ge=1)


class SessionSettings(_Part):
    """Life of sessions. Times in seconds. `retain`, unless a session asks for its own: `all` keeps earlier turns'
    thinking until the cache evicts it; `template` lets the chat template drop it at a new user message, which then
    costs a prefill from there."""

    retain: Literal["all", "template"] = "all"
    implicit: bool = True
    idle_ttl: Seconds = 3600
    busy_wait: Annotated[float, Field(ge=0)] = 5
    max_per_tenant: int = Field(default=10_000, ge=1)
    max_branch_tokens: int = Field(default=1 << 20, ge=1)
    headers: tuple[str, ...] = (
        "x-claude-code-session-id",
        "x-session-affinity",
        "x-opencode-session",
        "session-id",
        "x-dynamo-session-id",
        "helicone-session-id",
        "x-grok-conv-id",
        "x-cagent-session-id",
    )


class StoreSettings(_Part):
    """Where sessions live. `url` None: in this process. Else redis://, rediss:// (TLS, checked against `ca_file` or the
    system's authorities), unix://, or redis[s]+sentinel://host:port,host:port/service. `timeout`: seconds that any call
    may take; `lease`: seconds after which a silent gateway's turn may be taken over. `ledger_key`: base64 of 16 or 32
    bytes; token ids are then encrypted.
    """

    url: SecretStr | None = None
    timeout: Seconds = 0.25
    lease: Seconds = 30
    ca_file: str | None = None
    ledger_key: SecretStr | None = None

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: SecretStr | None) -> SecretStr | None:
        known = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
        if url and not url.get_secret_value().startswith(known):
            raise ValueError("a store URL starts with redis[s]://, unix:// or redis[s]+sentinel://")
        return url

    @field_validator("ledger_key")
    @classmethod
    def _key_size(cls, key: SecretStr | None) -> SecretStr | None:
        if key:
            try:
                size = len(base64.b64decode(key.get_secret_value(), validate=True))
            except ValueError:
                size = 0
            if size not in (16, 32):
                raise ValueError("a ledger key is the base64 of 16 or 32 random bytes")
        return key


class LimitSettings(_Part):
    """Bounds on what a client may send; checked before anything is parsed or rendered."""

    body_bytes: int = Field(default=32 << 20, ge=1024)
    messages: int = Field(default=10_000, ge=1)
    tools: int = Field(default=1_000, ge=1)


class UpstreamSettings(_Part):
    """Bounds on what the gateway waits for, in seconds."""

    connect: Seconds = 5
    silence: Seconds = 600
    abort: Seconds = 5
    control: Seconds = 10


class RoutingSettings(_Part):
    """Choice of workers. A worker with `saturated` running turns is left by sessions of soft affinity while another
    has room; None: never. The breaker opens after `breaker_failures` failed turns within `breaker_window` seconds and
    tries again after `breaker_rest`."""

    affinity: Literal["soft", "hard"] = "soft"
    saturated: int | None = Field(default=None, ge=1)
    health_interval: Seconds = 5
    breaker_failures: int = Field(default=5, ge=1)
    breaker_window: Seconds = 60
    breaker_rest: Seconds = 10


class StreamSettings(_Part):
    """Keep-alives. `chunk` sends an empty delta, which resets the chunk timeouts of clients that count
    parsed chunks; `comment` sends a comment line, which only keeps proxies from cutting the connection."""

    ping: Seconds = 15
    kind: Literal["chunk", "comment"] = "chunk"


class TelemetrySettings(_Part):
    """Traces go to `otlp_endpoint` (OTLP over HTTP, with its path: http://host:4318/v1/traces); None: nowhere."""

    otlp_endpoint: str | None = None
    service_name: str = "agentkv-gateway"


class UiSettings(_Part):
    """The page `/ui`. Token ids are content, so text is shown only where `show_content` says so."""

    show_content: bool = False


class MetricsSettings(_Part):
    """Where Prometheus finds `/metrics`. `port` None: on the port of the API; else only on this one, at `host` (None:
    the API's), answered by a thread of its own."""

    port: int | None = Field(default=None, ge=0, le=65535)
    host: str | None = None


class LogSettings(_Part):
    """How the process logs."""

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    format: Literal["json", "text"] = "text"


class Settings(BaseSettings):
    """Settings of one gateway process; immutable once read."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    model_path: Path
    workers: tuple[WorkerSettings, ...] = ()
    worker_key: SecretStr | None = None
    api_key: SecretStr | None = None
    admin_key: SecretStr | None = None
    join_token: Annotated[SecretStr, Field(min_length=16)] | None = None
    api_keys: tuple[KeySettings, ...] = ()
    tenants: dict[str, TenantSettings] = {}
    secret: Annotated[SecretStr, Field(min_length=16)] | None = None
    previous_secret: Annotated[SecretStr, Field(min_length=16)] | None = None
    policy: str = Field(default="agentkv", pattern=r"^[a-z0-9_]{1,32}$")
    budget: BudgetSettings = BudgetSettings()
    sessions: SessionSettings = SessionSettings()
    store: StoreSettings = StoreSettings()
    limits: LimitSettings = LimitSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    stream: StreamSettings = StreamSettings()
    routing: RoutingSettings = RoutingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    metrics: MetricsSettings = MetricsSettings()
    ui: UiSettings = UiSettings()
    log: LogSettings = LogSettings()
    shutdown_delay: Annotated[float, Field(ge=0)] = 0
    shutdown_grace: Seconds = 30

    @model_validator(mode="after")
    def _closed_to_strangers(self) -> Settings:
        if not (self.api_key or self.api_keys) and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reachable from outside: set api_keys (or api_key), or bind 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _one_secret_for_all(self) -> Settings:
        if self.store.url and not self.secret:
            raise ValueError("a shared store needs a secret that all gateway processes have: set secret")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


def load_settings(config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings: flags over environment over the YAML file `config`.

    Raises `pydantic.ValidationError` for wrong values and unknown keys, `ValueError` for unknown environment
    variables with our prefix, `FileNotFoundError` when `config` does not exist.
    """
    unknown = unknown_environment(os.environ)
    if unknown:
        raise ValueError(f"unknown environment variable {unknown[0]}: see `agentkv gateway --help`")
    if config is not None and not config.is_file():
        raise FileNotFoundError(f"configuration file {config} does not exist")

    class WithFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            base = super().settings_customise_sources(settings_cls, *sources, **named)
            return *base, YamlConfigSettingsSource(settings_cls, yaml_file=config)

    return WithFile(**dict(flags or {}))


def unknown_environment(environment: Mapping[str, str]) -> list[str]:
    """Environment variables with our prefix that name no setting (pydantic-settings ignores them)."""
    known = {name.upper() for name in Settings.model_fields}
    names = [name for name in environment if name.upper().startswith(ENV_PREFIX)]
    return sorted(n for n in names if n[len(ENV_PREFIX) :].upper().split("__")[0] not in known)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
