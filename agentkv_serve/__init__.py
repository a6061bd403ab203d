"""AgentKV Serve: serve LLM agents from a compressed, phase-aware KV cache."""

__version__ = "0.1.0"
