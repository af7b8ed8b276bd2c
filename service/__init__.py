"""The service: HTTP and gRPC in front of dynamically batched inference."""
