"""What the benchmarks compare this project with: plain services, and PyTorch."""
