"""Plans: what a sharded training will need and how fast it will be, before it runs."""
