"""What may replace or follow the plain average."""
