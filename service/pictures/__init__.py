"""Pictures of digits to images of 28 x 28."""
