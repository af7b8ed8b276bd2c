"""HTTP: reads requests and writes answers."""
