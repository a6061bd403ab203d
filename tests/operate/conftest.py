"""Gateways and engine doubles, as in the gateway's own tests."""

from tests.gateway.conftest import model_folder, start

__all__ = ["model_folder", "start"]
