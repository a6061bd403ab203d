"""Workers: which there are, how they do, and which one takes a turn."""
