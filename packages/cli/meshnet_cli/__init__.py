"""The composition root: the only package that knows all the others. Importing it imports no torch."""
