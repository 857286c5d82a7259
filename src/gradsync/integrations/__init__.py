"""Other people's training loops on our engine, without replacing anything of torch's: see `gradsync.dropin` for that.

Nothing here is imported by gradsync itself: each module needs the framework that it is for.
"""
