"""`gradsync demo --elastic`: a rank is killed in the middle, and the model is the same to the bit."""
