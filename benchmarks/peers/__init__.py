"""What other people would have written, to measure ours against."""
