"""Trains a network on MNIST and writes the weight file that the service loads."""
