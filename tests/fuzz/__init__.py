"""Generated programs and generated inputs, run until something is wrong."""
