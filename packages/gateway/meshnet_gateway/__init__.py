"""The gateway: text in, text out; it drives generations across the nodes."""
