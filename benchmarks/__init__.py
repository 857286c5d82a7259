"""What gradsync costs, measured from a checkout: a command, its rank, its result, its table and its picture a subject.

Not in the wheel: it needs rivals, root for network namespaces, and an hour. Ranks import only what they run:
nothing here may pull in typer, rich or matplotlib.
"""
