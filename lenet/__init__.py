"""What the service and the trainer share: the network, its weight file, its backends.

Refuses to know that there is a service or a trainer, and names no web framework.
"""
