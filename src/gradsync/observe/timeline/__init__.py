"""A timeline of all ranks: recorded on each, put together on rank 0, and shown as trace, picture and report."""
