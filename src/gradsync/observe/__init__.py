"""Passive records of what the engine did."""
