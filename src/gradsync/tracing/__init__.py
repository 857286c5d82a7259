"""Records some steps on all ranks, and has rank 0 write the timeline: trace, picture and report."""
