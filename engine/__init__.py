"""The engine half of AgentKV Serve: a plug-in for unmodified SGLang that keeps a compressed KV state per session."""

SGLANG_VERSION = "0.5.23"
"""The one version of SGLang whose private API this plug-in is written and tested against."""
