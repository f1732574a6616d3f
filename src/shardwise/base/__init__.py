"""What every package may use: errors, devices, units, files that vanish, the seam to observers."""
