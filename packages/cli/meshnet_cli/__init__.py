"""The composition root: the command line, which alone knows all the other packages."""
