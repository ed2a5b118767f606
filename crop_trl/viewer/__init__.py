"""One self-contained page in which to see what every method would train of some responses."""
