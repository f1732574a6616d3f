"""Other doors to the runtime."""
