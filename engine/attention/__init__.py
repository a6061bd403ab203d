"""Attention backends that read each session's window. Registered under SGLang's own names: many places branch on them."""
