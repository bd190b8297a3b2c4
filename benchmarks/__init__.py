"""What is measured, and how: `docs/benchmarks.md` tells what the figures mean."""
