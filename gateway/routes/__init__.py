"""HTTP routes: what each endpoint reads and answers."""
