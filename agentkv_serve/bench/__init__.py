"""Benchmarks of the product; each prints its full configuration and the machine."""
