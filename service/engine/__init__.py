"""Turns images into probabilities: queue, batches, contexts, models."""
