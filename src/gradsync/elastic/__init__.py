"""Training that goes on when ranks die or come: `gradsync.Elastic` in a rank, `gradsync run --elastic` beside it."""
