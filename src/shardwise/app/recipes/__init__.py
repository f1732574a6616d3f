"""Complete trainings. Importing this package, and checking a configuration, needs no torch."""
