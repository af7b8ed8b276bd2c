"""Processes that decode what is large."""
