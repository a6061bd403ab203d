"""`agentkv eval bfcl` and `agentkv eval tau2`: agents' task benchmarks through the gateway, by their own code."""
