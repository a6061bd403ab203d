"""Sessions: who a request belongs to, what the conversation's exact tokens are, and where that is kept."""
