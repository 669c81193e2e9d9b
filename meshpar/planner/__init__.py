"""What a parallel configuration will cost, worked out before it runs: without weights or a process group."""
