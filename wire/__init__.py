"""HTTP/1.1, HTTP/2, gRPC and ASGI for asyncio. Nothing here knows a path, an image or a model."""
