"""What people do with checkpoints that are there: look, compare, make others of them."""
