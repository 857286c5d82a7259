"""`gradsync bench`: a command, its rank, its result, its table and its picture for each subject.

Ranks import only what they run: nothing here may pull in typer, rich or matplotlib.
"""
