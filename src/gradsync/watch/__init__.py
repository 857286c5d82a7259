"""A small connection between ranks beside their collectives: who is alive, where each is, and last words."""
