"""What a model will need and how long it will take on hardware that is not there."""
