"""The server: digits in over HTTP and gRPC, batched inference, probabilities out."""
