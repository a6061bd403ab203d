"""`agentkv bench serve`: agents' load on SGLang with everything kept, and on ours at budgets."""
