"""What nodes say to each other, as values and as bytes."""
