"""`gradsync chaos`: real ranks, real faults, and a judge of what the others make of them."""
