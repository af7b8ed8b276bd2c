"""Bytes on a socket to requests, and answers to bytes. Nothing here knows an image or a model."""
