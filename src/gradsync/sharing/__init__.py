"""Optimizers of which each rank of a host steps its share."""
