"""What ranks do together: save a model and its optimizer, and load them on any mesh."""
