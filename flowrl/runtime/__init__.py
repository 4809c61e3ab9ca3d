"""What executes a Program."""
