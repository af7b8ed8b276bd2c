"""What the service and the trainer share: the network, its weight file and its backends."""
