"""Builds the documentation as a site: the pages of this repository, and a reference made from the code."""
