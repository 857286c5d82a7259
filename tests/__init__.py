"""The tests of gradsync. A package, so that a rank can import a test's body by the name pytest gave it."""
