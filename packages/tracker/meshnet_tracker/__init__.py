"""The tracker: who serves what, and which route a generation takes."""
