"""What keeps the three promises: no silent divergence, no needed flags, no unexplained hang."""
