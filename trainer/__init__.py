"""Train a network on MNIST and write the weight file that the service loads.

`python -m trainer` is the door; nothing here is imported by the service.
"""
