"""What operators look at: the fleet, and what the cache holds of one session."""
