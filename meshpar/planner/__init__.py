"""What a parallel configuration will cost, worked out before it runs."""
