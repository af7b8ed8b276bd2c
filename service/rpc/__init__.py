"""gRPC. The only package that imports grpc and protobuf."""
