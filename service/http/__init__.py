"""The way in over HTTP: reads requests, writes answers, decides nothing."""
