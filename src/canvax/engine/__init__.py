"""Images in flight: which program runs which rows, and the batch that holds their state on the devices."""
