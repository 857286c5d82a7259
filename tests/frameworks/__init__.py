"""Real frameworks, unchanged, on our engine: `make frameworks`. Not part of `make test`, which stays light."""
