"""What a training step would cost on machines that are not there: memory, collectives and time of each rank."""
