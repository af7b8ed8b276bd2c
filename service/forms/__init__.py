"""Forms on the wire: bytes to images, answers to bytes. Nothing here knows a server."""
