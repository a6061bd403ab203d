"""`agentkv demo`: a recorded agent run against the real product."""
