"""What ranks do together: a model and its optimizer to the disk, and back onto any mesh."""
