"""gRPC, the second way in: the only package that may import grpc and protobuf."""
