"""Attention backends that read each session's window.

They stand in SGLang's registry under its own names: many of its places branch on the backend's name.
"""
