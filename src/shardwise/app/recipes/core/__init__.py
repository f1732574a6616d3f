"""What every recipe shares: its configuration, its run folder, and the training itself."""
