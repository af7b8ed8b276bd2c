"""The API: HTTP paths and gRPC methods."""
