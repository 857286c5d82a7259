"""`gradsync doctor`: what is wrong with this machine, or with the hosts of a job, before it costs a training."""
