"""Logs: one line of JSON (or of text) an event. Content is never logged, sessions only by their hashed keys."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from agentkv_serve.gateway.settings import LogSettings


def configure(settings: LogSettings) -> None:
    """Set up the process's logging; called once, by the command."""
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    last: Any = structlog.processors.JSONRenderer() if settings.format == "json" else structlog.dev.ConsoleRenderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
