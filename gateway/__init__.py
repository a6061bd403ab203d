"""The session gateway: authenticates, resolves sessions, labels prompts, picks workers, relays streams."""
