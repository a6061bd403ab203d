"""Message level: what each part of a transcript is, for every wire format that agents speak."""
