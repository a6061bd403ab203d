"""The engine side of the gateway: the one HTTP client that talks to workers, its bodies and its frames."""
