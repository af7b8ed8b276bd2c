"""Baselines of the benchmarks: plain services, and PyTorch."""
