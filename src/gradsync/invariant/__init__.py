"""Training whose result does not depend on how many ranks there are."""
