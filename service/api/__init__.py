"""What is offered: paths of HTTP and methods of gRPC."""
