"""SGLang's entry point `sglang.srt.plugins`: registers hooks, cache and attention backends in every process."""

from __future__ import annotations


def register() -> None:
    """Called by SGLang once per process, before anything is built.

    SGLang only logs an exception from here. Our cache's name is registered last, so a server that asks for it cannot
    start after a failure, and a server that does not is left as it was.
    """
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from agentkv_serve.engine import build, selfcheck
    from agentkv_serve.engine.hooks import HOOKS

    selfcheck.require_version()
    for target, kind, hook in HOOKS:
        HookRegistry.register(target, hook, HookType(kind))
    backends = attention_registry.ATTENTION_BACKENDS
    for name, backend in build.BACKENDS.items():
        backends[name] = build.window_factory(backend, stock=backends[name])
    register_radix_cache_backend(build.BACKEND_NAME, build.build_cache)
