"""`python -m agentkv_serve` is the `agentkv` command."""

from agentkv_serve.cli import main

main()
