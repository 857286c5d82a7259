"""How a bucket travels between ranks."""
