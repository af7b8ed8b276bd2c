"""From images to probabilities: queue, batches, contexts, models. Knows no transport."""
