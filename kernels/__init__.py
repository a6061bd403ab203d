"""The AgentKV cache's operations on the hot path of a worker.

One package per operation. Each holds `reference.py`, a plain torch definition that is also the CPU path, and
`kernel.py`, the Triton kernel with the same signature; the package's `__init__` checks the arguments and
picks one of the two (`backend="torch"`, `"triton"`, or `None`: Triton where the tensors are on a GPU).
"""
