"""Checks that a user runs on a machine of their own: `agentkv check gpu`."""
